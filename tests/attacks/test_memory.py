"""Attacks on memory, and bombs, in a process with some MB more than a normal load takes."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import test_bombs as bombs
import test_hostile_folders as folders
import test_hostile_manifests as manifests
from forge import MANIFEST, TENSORS, forge, forge_file, join_header, new_model, split_header

import adapterhub as ah
from adapterhub.data.examples import read_examples
from adapterhub.data.options import DataOptions
from adapterhub.errors import AdapterhubError, DataError

MOST = 300 << 20
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
BIG = ("huge", "claimed", "overflow", "terabyte", "digits", "many", "beyond", "MB", "deep", "range",
       "unclosed", "thousands", "out of range", "million", "for ever", "sparse")  # fmt: skip


def sparse(folder: Path) -> None:
    """Make a sparse file of 60 GB that agrees with its manifest."""
    forge(folder, lambda tree: next(iter(tree["tensors"].values())).update(shape=[15 * 10**9]))
    with open(folder / TENSORS, "ab") as file:
        file.truncate(60 * 10**9 + 4000)


def attacks() -> dict[str, Callable[[Path], None]]:
    """Collect the attacks on memory from all tables."""
    table: dict[str, Callable[[Path], None]] = {"sparse": sparse}
    for name, change in manifests.REFUSED.items():
        table[f"manifest, {name}"] = lambda folder, change=change: forge(folder, change)
    for name, rewrite in manifests.RAW.items():
        table[f"bytes, {name}"] = lambda folder, rewrite=rewrite: _rewrite(folder, rewrite)
    for name, header in folders.HEADERS.items():
        table[f"header, {name}"] = lambda folder, header=header: _reheader(folder, header)
    for name, raw in folders.RAW.items():
        table[f"file, {name}"] = lambda folder, raw=raw: _reraw(folder, raw)
    return {name: attack for name, attack in table.items() if any(word in name for word in BIG)}


def _rewrite(folder: Path, rewrite: Callable[[bytes], bytes]) -> None:
    (folder / MANIFEST).write_bytes(rewrite((folder / MANIFEST).read_bytes()))


def _reheader(folder: Path, change: folders.Header) -> None:
    header, numbers = split_header((folder / TENSORS).read_bytes())
    change(header)
    forge_file(folder, TENSORS, join_header(header, numbers))


def _reraw(folder: Path, raw: Callable[[bytes, bytes], bytes]) -> None:
    data = (folder / TENSORS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    forge_file(folder, TENSORS, raw(data[8 : 8 + length], data[8 + length :]))


def peak() -> int:
    """Return the most resident memory of this process since the last call, in kB.

    Not `ru_maxrss`, which begins with the memory of the process that started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (most,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return int(most)


def limit(most: int) -> None:
    """Limit the memory of this process to what it has now, and `most` bytes."""
    import resource

    now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * PAGE
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + most, hard))


def noted(table: str, name: str, act: Callable[[], object]) -> None:
    """Print how a call ends, and by how much memory it grew."""
    peak()
    before = peak()  # what it has now
    try:
        act()
        outcome = "accepted"
    except AdapterhubError as error:
        outcome = f"refused: {error.problem}" if str(error) else "empty"
    except BaseException as error:
        outcome = repr(error)[:200]
    print(json.dumps([table, name, outcome, peak() - before]), flush=True)


def under_a_limit(valid: Path, place: Path, expanding: Path) -> None:
    """Run every attack and read every bomb under a limit; runs in a child process."""
    model = new_model()
    ah.load(model, valid).detach()
    limit(MOST)
    for name, attack in attacks().items():
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(valid, place)
        attack(place)
        noted("attacks", name, lambda: ah.load(model, place))
    bombs.read_rows(expanding / "small.parquet")
    bombs.read_pickle(expanding / "small")
    limit(bombs.MOST)
    bombs.read_all(expanding, functools.partial(noted, "bombs"))


@pytest.fixture(scope="module")
def results(valid: Path, tmp_path_factory) -> dict[str, list[tuple[str, str, int]]]:
    """The names, outcomes and growths of the attacks and of the bombs: one process for both."""
    folder = tmp_path_factory.mktemp("memory")
    (folder / "bombs").mkdir()
    bombs.make_all(folder / "bombs")
    places = ", ".join(f"t.Path({str(place)!r})" for place in (valid, "a", "bombs"))
    code = f"import test_memory as t; t.under_a_limit({places})"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[tuple[str, str, int]]] = {"attacks": [], "bombs": []}
    for table, *result in map(json.loads, done.stdout.splitlines()):
        found[table].append(tuple(result))
    return found


@pytest.mark.apart
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's limits")
def test_no_attack_allocates_much_memory(results) -> None:
    assert len(results["attacks"]) == len(attacks()) >= 60
    assert not [line for line in results["attacks"] if not line[1].startswith("refused: ")]
    # A manifest of 1 MiB takes about 20 MB as Python objects.
    most = max(results["attacks"], key=lambda line: line[2])
    assert most[2] < 100 << 10, most


@pytest.mark.apart
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's limits")
def test_no_bomb_expands(results) -> None:
    assert len(results["bombs"]) == len(bombs.DATA) + len(bombs.PICKLES) + 2 >= 14
    outcomes = {name: outcome for name, outcome, _ in results["bombs"]}
    assert outcomes.pop("small.parquet") == outcomes.pop("small") == "accepted"
    assert outcomes.pop("a dictionary.parquet") == "accepted", "equal texts are one object"
    assert not [r for r in outcomes.items() if not r[1].startswith("refused: ")]
    most = {name: grown for name, _, grown in results["bombs"]}
    assert max(most.values()) < bombs.GROWN, most


def test_a_compression_bomb_is_refused(tmp_path: Path) -> None:
    bomb = tmp_path / "train.tsv.gz"
    with gzip.open(bomb, "wb", compresslevel=1) as file:
        for _ in range(80):
            file.write(b"text\tlabel\n" * 100_000)
    assert bomb.stat().st_size < 1 << 20
    with pytest.raises(DataError, match="decompresses to more than"):
        read_examples(str(bomb), DataOptions(), labelled=True)
    small = tmp_path / "small.tsv.gz"
    small.write_bytes(gzip.compress(b"text\tlabel\n" + b"a\tb\n" * 100_000))
    assert len(read_examples(str(small), DataOptions(), labelled=True)) == 100_000

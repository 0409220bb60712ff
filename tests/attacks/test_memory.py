"""Attacks on memory, run in a process limited to 300 MB above the memory of a normal load."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import test_hostile_folders as folders
import test_hostile_manifests as manifests
from forge import MANIFEST, TENSORS, forge, forge_file, join_header, new_model, split_header

import adapterhub as ah
from adapterhub.data.examples import read_examples
from adapterhub.data.options import DataOptions
from adapterhub.errors import AdapterhubError, DataError

MOST = 300 << 20
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


def under_a_limit(valid: Path, place: Path) -> None:
    """Run every attack under the limit and print the outcomes; runs in a child process."""
    import resource

    model = new_model()
    ah.load(model, valid).detach()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MOST
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for name, attack in attacks().items():
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(valid, place)
        attack(place)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            ah.load(model, place)
            outcome = "accepted"
        except AdapterhubError as error:
            outcome = "refused" if str(error) else "empty"
        except BaseException as error:
            outcome = repr(error)[:200]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(json.dumps([name, outcome, grown]), flush=True)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's limits")
def test_no_attack_allocates_much_memory(valid: Path, tmp_path: Path) -> None:
    code = f"import test_memory as t; t.under_a_limit(t.Path({str(valid)!r}), t.Path('a'))"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(attacks()) >= 60
    assert not [line for line in results if line[1] != "refused"]
    # A manifest of 1 MiB takes about 20 MB as Python objects.
    assert max(grown for _, _, grown in results) < 100 << 10, max(results, key=lambda r: r[2])


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

"""Files of strangers that are large: none is in memory as a whole before it is known to be right.

Holes take no space on a disk, so that a folder of some kB can hold files of any size.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forge import CARD, MANIFEST, TENSORS, forge, join_header, limited
from test_hostile_registry import sparse

from adapterhub.errors import FileError
from adapterhub.files.native import Saved, published_texts, write_adapter
from adapterhub.pages.page import read_run
from adapterhub.registry.bucket import Bucket
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import Publication
from tests.kit import registries
from tests.kit.selection import long_table

HUGE = 40 << 30
LARGE = 48 << 20
MOST = 20 << 20  # bytes of Python objects at any time: some pieces of a file

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no holes by default")


def large(folder: Path) -> Path:
    """Write an adapter of LARGE bytes."""
    manifest = Saved.at(registries.write_sample(folder)).manifest
    manifest = replace(manifest, tensors={}, files={})
    numbers = {"encoder.0.attn.q.lora.a": torch.ones(LARGE // 4)}
    write_adapter(folder, manifest, numbers, overwrite=True)
    return folder


READERS: dict[str, tuple[str, ...]] = {
    "publish": ("publish", "made", "--registry", "registry"),
    "verify": ("verify", "made"),
    "verify a version": ("verify", "polite", "--registry", "registry"),
    "pull": ("pull", "polite", "--to", "out", "--registry", "registry"),
    "lock": ("lock", "polite", "--registry", "registry"),
    "registry verify": ("registry", "verify", "--registry", "registry"),
    "diff": ("diff", "made", "made"),
    "sign": ("sign", "made", "--key", "key"),
    "publish again": ("publish", "made", "--registry", "registry", "--description", "mine"),
}


@pytest.fixture
def place(tmp_path, monkeypatch, adapterhub):
    """Return a function that puts a folder where READERS have it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert adapterhub("key", "new", "key")[0] == 0

    def put(make: Callable[[Path], Path]) -> list[Path]:
        LocalRegistry(Path("registry")).put(make(Path("made")), Publication("polite"))
        (version,) = Path("registry").glob("*/polite/v1")
        return [Path("made"), version]

    return put


def peak(act: Callable[[], object]) -> int:
    """Return the most bytes of Python objects that a call had at a time."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@long_table("reader", READERS, 3)
def test_no_file_of_tensors_is_in_memory_as_a_whole(reader, place, adapterhub):
    place(large)
    adapterhub(*READERS[reader], "--help")  # imports
    results = []
    assert peak(lambda: results.append(adapterhub(*READERS[reader]))) < MOST, results
    assert results[0][0] == (1 if "verify" in reader.split()[:1] else 0), results  # 1: not signed


def holes(folder: Path) -> None:
    """Declare HUGE bytes in the manifest alone."""
    forge(folder, lambda tree: next(iter(tree["tensors"].values())).update(shape=[HUGE // 4]))
    size = (folder / TENSORS).stat().st_size
    os.truncate(folder / TENSORS, size - 32 + HUGE)  # 32: the bytes of the sample


def agreeing_holes(folder: Path, size: int = LARGE) -> None:
    """Declare so many bytes in manifest and header, with the digest of something else."""
    count = size // 4
    forge(folder, lambda tree: next(iter(tree["tensors"].values())).update(shape=[count]))
    (name,) = Saved.at(folder).manifest.tensors
    info = {"dtype": "F32", "shape": [count], "data_offsets": [0, size]}
    header = join_header({name: info}, b"")
    (folder / TENSORS).write_bytes(header)
    os.truncate(folder / TENSORS, len(header) + size)


ATTACKS = {
    "holes": holes,
    "agreeing holes": agreeing_holes,
    **{
        f"a huge {name}": lambda folder, name=name: sparse(folder / name, HUGE)
        for name in (MANIFEST, CARD, "adapter.sig")
    },
}
OPEN_NO_CARD = {"verify", "verify a version", "registry verify", "diff", "sign", "lock",
                "publish again"}  # fmt: skip
OPEN_NO_SIGNATURE = {"registry verify", "diff"}


@long_table(("attack", "reader"), itertools.product(ATTACKS, READERS))
def test_holes_are_refused_in_little_time_and_memory(attack, reader, place, adapterhub):
    for folder in place(registries.write_sample):
        ATTACKS[attack](folder)
    results = []
    with limited():
        assert peak(lambda: results.append(adapterhub(*READERS[reader]))) < MOST
    (code, out, err) = results[0]
    unopened = (CARD in attack and reader in OPEN_NO_CARD) or (
        "sig" in attack and reader in OPEN_NO_SIGNATURE
    )
    assert "Traceback" not in err
    if not unopened:
        assert code != 0, out
        assert re.search(
            r"damaged|match its manifest|more than|too large|cannot be read|not what was published",
            out + err,
        )


@pytest.mark.parametrize("more", [(), ("--tag", "best")])
def test_what_does_not_fit_is_refused_before_it_is_read(place, adapterhub, monkeypatch, more):
    """The manifest and the header agree on HUGE bytes."""
    place(registries.write_sample)
    agreeing_holes(Path("made"), HUGE)
    usage = shutil.disk_usage(".")._replace(free=HUGE - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with limited():
        code, _, err = adapterhub(*READERS["publish"], *more)
    assert code != 0
    assert re.search(r"an adapter of 42,949,672,960 bytes does not fit into registry", err)


def test_a_bucket_gets_and_gives_large_files_in_pieces(tmp_path, monkeypatch):
    objects = pytest.importorskip("obstore.store")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = Registry(Bucket("s3://b", objects.MemoryStore()))
    folder = large(tmp_path / "made")
    entries = []
    assert peak(lambda: entries.append(store.put(folder, Publication("polite")))) < MOST
    assert store.verify() == []
    files = Bucket("s3://b", objects.LocalStore(str(folder)))
    assert peak(lambda: files.download(TENSORS, tmp_path / "got", HUGE)) < MOST
    assert (tmp_path / "got").read_bytes() == (folder / TENSORS).read_bytes()


HUGE_FILES: dict[str, Callable[[Path], object]] = {
    **dict.fromkeys(("metrics.jsonl", "timings.jsonl", "predictions.jsonl"), read_run),
    CARD: lambda folder: published_texts(folder, (CARD,)),
    MANIFEST: lambda folder: published_texts(folder, (MANIFEST,)),
}


@pytest.mark.parametrize("name", HUGE_FILES)
def test_a_huge_file_is_refused(name, tmp_path):
    registries.write_sample(tmp_path / "adapter")
    for size in (2 << 30, HUGE):
        sparse(tmp_path / name, size)
        with limited(), pytest.raises(FileError, match="bytes"):
            HUGE_FILES[name](tmp_path)

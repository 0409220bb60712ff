"""Hostile registry folders: links, pipes, broken files, names, and changes at the wrong moment."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
import sample_adapters

from adapterhub.errors import AdapterhubError, FileError
from adapterhub.registry import local, lockfile
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.local_versions import digest_of
from adapterhub.registry.lockfile import pin, sync
from adapterhub.registry.store import Publication

BACKBONE = "acme--bert-small"


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A registry with two versions of `polite`, and one of `sound`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = LocalRegistry(tmp_path / "registry")
    for name, seed in (("polite", 0), ("polite", 1), ("sound", 2)):
        made = sample_adapters.write(tmp_path / f"made-{seed}", seed)
        store.put(made, Publication(name))
    return store


def exchange(first: Path, second: Path) -> None:
    """Swap two folders."""
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def swap_before_copying(module, monkeypatch, version: Path, other: Path) -> None:
    """Exchange a version for another adapter after its checks, and before it is copied."""
    real = module.copy_adapter

    def swapped(source, *arguments):
        exchange(version, other)
        return real(source, *arguments)

    monkeypatch.setattr(module, "copy_adapter", swapped)


def test_a_version_swapped_after_the_check_is_not_restored(registry, tmp_path, monkeypatch):
    other = sample_adapters.write(tmp_path / "other", 9)
    name, pinned = pin("polite@v1", registry.root)
    version = registry.root / BACKBONE / "polite" / "v1"
    swap_before_copying(lockfile, monkeypatch, version, other)
    with pytest.raises(FileError, match="not what was published"):
        sync({name: pinned}, tmp_path / "adapters", registry.root)
    assert not (tmp_path / "adapters" / "polite").exists()


def test_a_version_swapped_after_the_check_is_not_pulled(registry, tmp_path, monkeypatch):
    other = sample_adapters.write(tmp_path / "other", 9)
    entry = registry.resolve("polite", "v1")
    version = registry.root / BACKBONE / "polite" / "v1"
    swap_before_copying(local, monkeypatch, version, other)
    with pytest.raises(FileError, match="not what was published"):
        registry.get(entry, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_swaps_at_any_moment_never_land(registry, tmp_path):
    """Another thread exchanges the version for another adapter all the time."""
    other = sample_adapters.write(tmp_path / "other", 9)
    name, pinned = pin("polite@v1", registry.root)
    version, stop = registry.root / BACKBONE / "polite" / "v1", threading.Event()

    def swap():
        while not stop.is_set():
            exchange(version, other)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for number in range(40):
            target = tmp_path / f"adapters-{number}"
            with contextlib.suppress(AdapterhubError):
                sync({name: pinned}, target, registry.root)
            if (target / "polite").exists():
                assert digest_of(target / "polite") == pinned.digest
    finally:
        stop.set()
        thread.join()

"""Folders are written whole or not at all; files are read within limits."""

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import adapterhub
from adapterhub.backbones.find import find_backbone
from adapterhub.backbones.torch_free_checks import check_backbone_options
from adapterhub.data.media import open_media
from adapterhub.data.media_formats import open_picture
from adapterhub.data.options import DataOptions
from adapterhub.data.tables import read_table
from adapterhub.errors import AdapterhubError
from adapterhub.files import atomic
from adapterhub.files.native import Saved
from adapterhub.interchange.checkpoint_files import read_json_object, read_tensor_file
from adapterhub.interchange.peft.files import tensor_shapes
from tests.kit import registries


def save(folder: Path, content: bytes, overwrite: bool = False) -> None:
    with atomic.staging(folder) as staged:
        atomic.write_files(staged, {"a.txt": content})
        atomic.put_in_place(staged, folder, overwrite)


def test_a_failure_leaves_no_trace(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    with pytest.raises(FileExistsError), atomic.staging(folder) as staged:
        atomic.write_files(staged / "..", {staged.name: b"x"})
    assert list(folder.parent.iterdir()) == []


@pytest.mark.skipif(atomic.fcntl is None, reason="Windows has no such locks")
def test_the_next_save_removes_leftovers_of_its_own_and_keeps_locked_ones(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    stale, other = (tmp_path / f"{atomic._prefix(tmp_path / name)}0123" for name in ("out", "b"))
    (stale / "whole").mkdir(parents=True)
    other.mkdir()
    with atomic.staging(folder) as first, atomic.staging(folder):
        assert first.is_dir()
        assert not stale.exists()
    with atomic.staging(folder) as first:
        save(folder, b"new")
        assert first.is_dir()
    assert sorted(tmp_path.iterdir()) == sorted([other, folder]), "those of another stay"


def test_a_file_is_replaced_in_one_step_and_through_no_link(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    atomic.replace_file(path, b"one")
    atomic.replace_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]
    path.unlink()
    (tmp_path / "other").write_bytes(b"x")
    for name in (".a.txt.new", "a.txt"):
        os.symlink(tmp_path / "other", tmp_path / name)
    atomic.replace_file(path, b"one")
    assert (path.is_symlink(), path.read_bytes()) == (False, b"one")
    assert (tmp_path / "other").read_bytes() == b"x"


def test_a_failed_replacement_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a.txt").write_bytes(b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        atomic.replace_file(tmp_path / "a.txt", b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a.txt", b"old")]


def test_a_file_is_read_within_its_limits(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"four")
    (tmp_path / "empty").write_bytes(b"")
    os.symlink(path, tmp_path / "link")
    assert atomic.read_file(path, 4, 4, hashlib.sha256(b"four").hexdigest()) == b"four"
    for name, limits, digest, reason in (
        ("a", (5, 9), None, "truncated"),
        ("a", (0, 3), None, "more than 3"),
        ("a", (0, 9), "0" * 64, "sha256"),
        ("empty", (0, 9), None, "truncated: 0 of at least 1"),
        ("link", (0, 9), None, "symbolic link"),
        ("missing", (0, 9), None, "missing"),
    ):
        with pytest.raises(atomic.UnreadableError, match=reason):
            atomic.read_file(tmp_path / name, *limits, digest)


_CODES = ("EINVAL", "EIO", "ENOTSUP", "ENOSYS", "EACCES", "EPERM", "EBADF", "ENOSPC")


@pytest.mark.parametrize("code", _CODES)
@pytest.mark.parametrize("of", ["fsync", "open"])
def test_a_disk_that_syncs_no_folder_takes_files(tmp_path, monkeypatch, code, of):
    number, real = getattr(errno, code), getattr(os, of)
    monkeypatch.setattr(atomic, "fcntl", None)  # whose lock opens the folder, too

    def call(what: Any, *rest: Any, **more: Any) -> Any:
        if of == "open" and not Path(what).exists():
            return real(what, *rest, **more)
        if stat.S_ISDIR((os.fstat if of == "fsync" else os.stat)(what).st_mode):
            raise OSError(number, os.strerror(number))
        return real(what, *rest, **more)

    monkeypatch.setattr(os, of, call)
    full = pytest.raises(OSError, match=os.strerror(number))
    with full if code == "ENOSPC" else contextlib.nullcontext():
        save(tmp_path / "a", b"1")
        save(tmp_path / "a", b"2", overwrite=True)
        atomic.sync_files(tmp_path / "a")
        atomic.replace_file(tmp_path / "f", b"3")
        assert (tmp_path / "a" / "a.txt").read_bytes() == b"2"


@pytest.mark.parametrize("code", _CODES)
def test_a_file_that_the_disk_lost_is_an_error(tmp_path, monkeypatch, code):
    number = getattr(errno, code)

    def fsync(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    lost = code not in ("EINVAL", "ENOTSUP", "ENOSYS")
    error = pytest.raises(OSError, match=os.strerror(number))
    with error if lost else contextlib.nullcontext():
        atomic.replace_file(tmp_path / "f", b"1")
    assert (tmp_path / "f").exists() != lost


def test_only_the_owners_sync() -> None:
    """Each other `fsync` of the package would be one that a network disk refuses."""
    package = Path(adapterhub.__path__[0])
    found = {p.name: p.read_text().count("os.fsync(") for p in package.rglob("*.py")}
    assert {p: n for p, n in found.items() if n} == {"user_folders.py": 2}


@pytest.mark.parametrize("most", [None, 0, 1, 1 << 20, (1 << 20) + 1, 5 << 20])
def test_the_digest_of_a_file_or_its_beginning(tmp_path: Path, most: int | None) -> None:
    data = bytes(range(256)) * ((3 << 20) // 256) + b"end"
    (tmp_path / "file").write_bytes(data)
    part = data if most is None else data[:most]
    expected = atomic.FileDigest(len(part), hashlib.sha256(part).hexdigest())
    assert atomic.file_digest(tmp_path / "file", most) == expected


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 9\n" % (b"0" * 64)


def _table(name: str, folder: Path) -> None:
    read_table(str(folder / name), DataOptions(), "train")


_READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "manifest": ("adapter.json", lambda folder: Saved.at(folder).read()),
    "tensors": ("adapter.safetensors", lambda folder: Saved.at(folder).read()),
    "peft": (
        "adapter_model.safetensors",
        lambda folder: read_tensor_file(folder, "adapter_model.safetensors", "x.bin"),
    ),
    "peft's shapes": ("adapter_model.safetensors", tensor_shapes),
    "peft's config": (
        "adapter_config.json",
        lambda folder: read_json_object(folder / "adapter_config.json", 9999, expected=""),
    ),
    **{
        f"data{suffix}": (f"rows{suffix}", partial(_table, f"rows{suffix}"))
        for suffix in (".csv", ".tsv", ".jsonl", ".json", ".parquet", ".csv.gz", ".txt", ".xlsx")
    },
    "picture": ("a.png", lambda folder: open_media(str(folder / "a.png"), open_picture)),
    "weights": ("model.safetensors", lambda folder: check_backbone_options(str(folder))),
    "tokenizer": ("tokenizer.json", lambda folder: find_backbone(str(folder))),
}


@pytest.mark.parametrize("what", _READERS)
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, what: str) -> None:
    name, read = _READERS[what]
    registries.write_sample(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text("{}")
    (tmp_path / "a" / name).write_bytes(POINTER)
    with pytest.raises(AdapterhubError, match=r"git(?s:.*)lfs pull"):
        read(tmp_path / "a")

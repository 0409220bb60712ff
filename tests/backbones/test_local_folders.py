"""The folders of local backbones are remembered, and their record is no obstacle if damaged."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adapterhub.backbones import find
from adapterhub.backbones.find import recorded_folder, remember_folder
from adapterhub.config.user_folders import state_folder

NAME = "bert--0123456789ab"


def records() -> list[Path]:
    return sorted((state_folder() / "backbones").glob("*.json"))


def test_a_folder_is_found_by_the_name_of_the_backbone(tmp_path, monkeypatch):
    assert recorded_folder(NAME) is None
    monkeypatch.chdir(tmp_path)
    remember_folder(NAME, Path("bert"))
    assert recorded_folder(NAME) == str(tmp_path / "bert")
    assert recorded_folder("bert--ba9876543210") is None
    remember_folder(NAME, tmp_path / "moved")
    assert recorded_folder(NAME) == str(tmp_path / "moved")
    assert len(records()) == 1
    assert [p.name for p in records()[0].parent.iterdir()] == [records()[0].name]


@pytest.mark.parametrize(
    "data",
    [b"", b"x", b"[]", b"\xff", b'{"folder": 1, "name": "bert--0123456789ab"}', b"[" * 99_999,
     b'{"folder": "relative", "name": "bert--0123456789ab"}', b'{"folder": "/x", "name": "y"}'],
)  # fmt: skip
def test_a_damaged_record_is_ignored_and_replaced(tmp_path, data):
    remember_folder(NAME, tmp_path)
    records()[0].write_bytes(data)
    assert recorded_folder(NAME) is None
    remember_folder(NAME, tmp_path)
    assert recorded_folder(NAME) == str(tmp_path)


def test_a_pipe_or_link_is_not_read(tmp_path):
    remember_folder(NAME, tmp_path)
    path = records()[0]
    other = tmp_path / "other.json"
    path.rename(other)
    path.symlink_to(other)
    assert recorded_folder(NAME) is None
    path.unlink()
    os.mkfifo(path)
    assert recorded_folder(NAME) is None


def test_a_state_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("ADAPTERHUB_STATE", str(tmp_path / "file"))
    remember_folder(NAME, tmp_path)
    assert recorded_folder(NAME) is None


def test_the_oldest_go_first(tmp_path, monkeypatch):
    monkeypatch.setattr(find, "MOST_FOLDERS", 3)
    for number in range(5):
        remember_folder(f"n{number}--0123456789ab", tmp_path)
        os.utime(max(records(), key=lambda p: p.stat().st_mtime_ns), ns=(number, number))
    left = sorted(json.loads(p.read_bytes())["name"][:2] for p in records())
    assert left == ["n2", "n3", "n4"]


def test_several_writers(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: remember_folder(NAME, tmp_path / str(n % 3)), range(200)))
    assert recorded_folder(NAME) in {str(tmp_path / str(n)) for n in range(3)}
    assert len([*records()[0].parent.iterdir()]) == 1

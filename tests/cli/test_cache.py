"""`adapterhub cache`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adapterhub.training.activation_folders import activations_folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a cache folder of this test, with one entry."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = activations_folder() / "abc"
    folder.mkdir(parents=True)
    (folder / "states.bin").write_bytes(bytes(2_500_000))


def test_entries_are_listed_and_cleared(adapterhub) -> None:
    code, out, _ = adapterhub("cache")
    assert code == 0
    assert out.startswith("abc ")
    assert "2.5 MB  last used 20" in out
    assert f"1 entries, 2.5 MB in {activations_folder()}\n" in out
    assert adapterhub("cache", "--clear")[1] == f"deleted 2.5 MB in {activations_folder()}\n"
    assert not (activations_folder() / "abc").exists()
    assert adapterhub("cache")[1].startswith("0 entries")


def test_json_has_bytes(adapterhub) -> None:
    listed = json.loads(adapterhub("cache", "--json")[1])
    assert listed["folder"] == str(activations_folder())
    assert [(e["folder"], e["bytes"]) for e in listed["entries"]] == [("abc", 2_500_000)]
    assert json.loads(adapterhub("cache", "--clear", "--json")[1])["cleared"] == 2_500_000

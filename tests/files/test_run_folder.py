"""The recipe next to an adapter names a local backbone, or none is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapterhub.files.run_folder import backbone_of_run, names_in, no_adapter


def run(folder: Path, backbone: str) -> Path:
    (folder / "adapter").mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(f"backbone: {backbone}\n")
    return folder / "adapter"


def test_a_local_folder_is_used(tmp_path: Path) -> None:
    assert backbone_of_run(run(tmp_path, str(tmp_path))) == str(tmp_path)


@pytest.mark.parametrize("backbone", ["acme/bert", "/no/such/folder", "//host/share", '"\\\\host"'])
def test_another_backbone_is_not(tmp_path: Path, backbone: str) -> None:
    assert backbone_of_run(run(tmp_path, backbone)) is None


def test_a_missing_or_linked_recipe_is_ignored(tmp_path: Path) -> None:
    adapter = run(tmp_path, str(tmp_path))
    (tmp_path / "recipe.yaml").rename(tmp_path / "other.yaml")
    assert backbone_of_run(adapter) is None
    (tmp_path / "recipe.yaml").symlink_to(tmp_path / "other.yaml")
    assert backbone_of_run(adapter) is None


def test_the_error_for_a_folder_says_what_is_in_it(tmp_path: Path) -> None:
    assert "no such folder" in str(no_adapter(tmp_path / "none"))
    (tmp_path / "file").write_text("x")
    assert "is not a folder" in str(no_adapter(tmp_path / "file"))
    for number in range(9):
        (tmp_path / f"d{number}").mkdir()
    assert "in it: d0/, d1/, d2/, d3/, d4/, d5/, d6/, d7/ and 2 more" in str(no_adapter(tmp_path))
    assert names_in(tmp_path / "none") == []

"""The backbone of an adapter: the user's choice, the recipe's next to it, or the manifest's id."""

from __future__ import annotations

from pathlib import Path

import pytest

import adapterhub as ah
from adapterhub.files.run_folder import (
    backbone_of_adapter,
    names_in,
    no_adapter,
)
from tests.kit import tiny_models


def test_the_error_for_a_folder_says_what_is_in_it(tmp_path: Path) -> None:
    assert "no such folder" in str(no_adapter(tmp_path / "none"))
    (tmp_path / "file").write_text("x")
    assert "is not a folder" in str(no_adapter(tmp_path / "file"))
    for number in range(9):
        (tmp_path / f"d{number}").mkdir()
    assert "in it: d0/, d1/, d2/, d3/, d4/, d5/, d6/, d7/ and 2 more" in str(no_adapter(tmp_path))
    assert names_in(tmp_path / "none") == []


@pytest.fixture
def adapter(tmp_path):
    """A saved adapter, and its manifest with a Hub id and a commit."""
    model = tiny_models.model("bert")
    model.config._name_or_path, model.config._commit_hash = "acme/bert", "a" * 40
    manifest = ah.attach(model, "lora").save(tmp_path / "run" / "adapter")
    return tmp_path / "run" / "adapter", manifest


def test_the_choice_comes_first_then_the_run_then_the_manifest(adapter, tmp_path):
    assert backbone_of_adapter(*adapter) == ("acme/bert", "a" * 40)
    recipe = tmp_path / "run" / "recipe.yaml"
    recipe.write_text(f"backbone: {tmp_path}\n", encoding="utf-8")
    assert backbone_of_adapter(*adapter) == (str(tmp_path), None)
    recipe.write_text("backbone: not/here\n", encoding="utf-8")
    assert backbone_of_adapter(*adapter) == ("acme/bert", "a" * 40)
    # The user's choice has no revision.
    assert backbone_of_adapter(*adapter, "acme/bert") == ("acme/bert", None)

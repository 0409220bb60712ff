"""The backbone of an adapter: the user's choice, the run's folder, or the manifest's id."""

from __future__ import annotations

import pytest

import adapterhub as ah
from adapterhub.files.run_folder import backbone_of_adapter
from tests.kit import tiny_models


@pytest.fixture
def adapter(tmp_path):
    """A saved adapter, and its manifest with a Hub id and a commit."""
    model = tiny_models.model("bert")
    model.config._name_or_path, model.config._commit_hash = "acme/bert", "a" * 40
    manifest = ah.attach(model, "lora").save(tmp_path / "run" / "adapter")
    return tmp_path / "run" / "adapter", manifest


def test_the_manifest_has_an_id_and_a_commit(adapter):
    assert backbone_of_adapter(*adapter) == ("acme/bert", "a" * 40)


def test_the_folder_of_the_run_comes_before_the_manifest(adapter, tmp_path):
    recipe = tmp_path / "run" / "recipe.yaml"
    recipe.write_text(f"backbone: {tmp_path}\n", encoding="utf-8")
    assert backbone_of_adapter(*adapter) == (str(tmp_path), None)
    recipe.write_text("backbone: not/here\n", encoding="utf-8")
    assert backbone_of_adapter(*adapter) == ("acme/bert", "a" * 40)


def test_the_users_choice_comes_first_and_has_no_revision(adapter):
    assert backbone_of_adapter(*adapter, "acme/bert") == ("acme/bert", None)

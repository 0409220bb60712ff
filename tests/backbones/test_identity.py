"""The name and the origin of a loaded backbone."""

from __future__ import annotations

import pytest
import tiny_models
import transformers

import adapterhub as ah
from adapterhub.backbones.identity import name_and_revision, origin_of

COMMIT = "a" * 40


def named(name, commit=None):
    model = tiny_models.model("bert", "features")
    model.config._name_or_path = name
    model.config._commit_hash = commit
    return model


@pytest.mark.parametrize(
    ("path", "name", "revision"),
    [
        ("google/bert", "google/bert", COMMIT),
        ("bert-base", "bert-base", COMMIT),
        (f"/cache/models--google--bert/snapshots/{COMMIT}", "google/bert", COMMIT),
        (f"C:\\cache\\models--google--bert\\snapshots\\{COMMIT}", "google/bert", COMMIT),
        ("/home/me/my model/", "my-model", COMMIT),
        ("a/b/tiny..bert", "tiny-bert", COMMIT),
        ("/", "unnamed-bert", COMMIT),
        ("", "unnamed-bert", COMMIT),
    ],
)
def test_the_name_is_valid_on_any_machine(path, name, revision):
    assert name_and_revision(named(path, COMMIT)) == (name, revision)


def test_a_folder_in_the_working_directory_is_not_a_hub_id(monkeypatch, tmp_path):
    (tmp_path / "google" / "bert").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert name_and_revision(named("google/bert"))[0] == "bert"


def test_the_origin_is_the_folder_as_long_as_it_exists(backbone, tmp_path):
    model, _ = ah.load_backbone(str(backbone))
    assert origin_of(model) == backbone
    by_transformers = transformers.AutoModel.from_pretrained(backbone)
    assert origin_of(by_transformers) == backbone
    assert origin_of(named(str(tmp_path / "deleted"))) is None
    assert origin_of(named("acme/never-downloaded")) is None

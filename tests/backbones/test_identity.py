"""The name and the origin of a loaded backbone."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers

import adapterhub as ah
from adapterhub.anatomy.backbone import Backbone, local_name
from adapterhub.backbones.find import find_backbone, is_hub_id, is_local_name
from adapterhub.errors import BackboneError, MismatchError
from adapterhub.files.native import Saved
from tests.kit import tiny_models

COMMIT = "a" * 40
DIGEST = "0123456789ab"


def fingerprint():
    return f"bf16-{DIGEST}{'c' * 52}"


def named(name, commit=None):
    model = tiny_models.model("bert", "features")
    model.config._name_or_path = name
    model.config._commit_hash = commit
    return model


def test_the_name_is_valid_on_any_machine(subtests):
    cases = [
        ("google/bert", "google/bert", COMMIT),
        ("bert-base", "bert-base", COMMIT),
        (f"/cache/models--google--bert/snapshots/{COMMIT}", "google/bert", COMMIT),
        (f"C:\\cache\\models--google--bert\\snapshots\\{COMMIT}", "google/bert", COMMIT),
        ("/home/me/my model/", f"my-model--{DIGEST}", COMMIT),
        ("a/b/tiny..bert", f"tiny-bert--{DIGEST}", COMMIT),
        ("acme/bert--with-a", f"bert--with-a--{DIGEST}", COMMIT),
        (f"/{'x' * 200}", f"{'x' * 100}--{DIGEST}", COMMIT),
        ("/", f"unnamed-bert--{DIGEST}", COMMIT),
        ("", f"unnamed-bert--{DIGEST}", COMMIT),
    ]
    for path, name, revision in cases:
        with subtests.test(path=path):
            assert Backbone.of(named(path, COMMIT)).name_and_revision(fingerprint) == (
                name,
                revision,
            )
            assert is_local_name(name) == (not is_hub_id(name))


def test_a_folder_in_the_working_directory_is_not_a_hub_id(monkeypatch, tmp_path):
    (tmp_path / "google" / "bert").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert Backbone.of(named("google/bert")).name_and_revision(fingerprint)[0] == f"bert--{DIGEST}"


def test_a_folder_is_no_hub_id_after_a_change_of_the_working_directory(
    backbone, monkeypatch, tmp_path
):
    shutil.copytree(backbone, tmp_path / "google" / "bert")
    monkeypatch.chdir(tmp_path)
    model, _ = ah.load_backbone("google/bert")
    monkeypatch.chdir("/")
    assert Backbone.of(model).name_and_revision(fingerprint)[0] == f"bert--{DIGEST}"
    assert Backbone.of(model).origin == tmp_path / "google" / "bert"


def test_weights_have_one_name_and_other_weights_another(backbone, tmp_path):
    """Adapters load on the same weights, from whatever folder, and on no others."""
    for folder in ("one", "two", "other"):
        shutil.copytree(backbone, tmp_path / folder / "model")
    other, _ = ah.load_backbone(str(backbone))
    with torch.no_grad():
        other.get_input_embeddings().weight.add_(1.0)
    other.save_pretrained(tmp_path / "other" / "model")
    models = [
        ah.load_backbone(str(tmp_path / folder / "model"))[0] for folder in ("one", "two", "other")
    ]
    for folder, model in zip(("one", "two", "other"), models, strict=True):
        ah.attach(model, "lora", name=folder).save(tmp_path / f"saved-{folder}")
        ah.activate(model)
    ids = [Saved.at(tmp_path / f"saved-{f}").manifest.backbone.id for f in ("one", "two", "other")]
    assert ids[0] == ids[1] != ids[2]
    assert [name.partition("--")[0] for name in ids] == ["model"] * 3
    one, two, other = models
    two.config._name_or_path = "acme/the-hub-s-copy"
    ah.load(two, tmp_path / "saved-one")
    ah.load(one, tmp_path / "saved-two")
    for model, saved in ((other, "one"), (one, "other")):
        with pytest.raises(MismatchError, match="different backbone") as caught:
            ah.load(model, tmp_path / f"saved-{saved}")
        assert "load_backbone('path/to/model')" in str(caught.value)


def test_a_local_name_is_never_looked_up_on_the_hub():
    with pytest.raises(BackboneError, match="was in a folder") as caught:
        find_backbone(local_name("tiny-bert", fingerprint))
    assert "load_backbone(FOLDER)" in str(caught.value)


def test_a_model_without_weights_has_a_local_name():
    def missing():
        raise BackboneError("no weights")

    assert is_local_name(local_name("tiny-bert", missing))


def test_the_origin_is_the_folder_as_long_as_it_exists(backbone, tmp_path):
    model, _ = ah.load_backbone(str(backbone))
    assert Backbone.of(model).origin == backbone
    by_transformers = transformers.AutoModel.from_pretrained(backbone)
    assert Backbone.of(by_transformers).origin == backbone
    assert Backbone.of(named(str(tmp_path / "deleted"))).origin is None
    assert Backbone.of(named("acme/never-downloaded")).origin is None

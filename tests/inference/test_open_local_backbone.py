"""An adapter of a local backbone finds it again, wherever its files are on this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import adapterhub as ah
from adapterhub.config.user_folders import state_folder

WAYS = ("run", "moved run", "copy", "published", "pulled", "./run from elsewhere")


@pytest.fixture
def trained_here(backbone, data, adapterhub, tmp_path, monkeypatch):
    """A run that was typed with a relative path to a local backbone."""
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "registry"))
    home = tmp_path / "home"
    shutil.copytree(backbone, home / "my-bert")
    monkeypatch.chdir(home)
    files = ("--train", data[0], "--eval", data[1], "--output", "run")
    options = ("train.epochs=1", "train.tensorboard=false")
    assert adapterhub("train", "--backbone", "./my-bert", *files, *options)[0] == 0
    return home


def predicted(adapterhub, reference, *options):
    code, out, err = adapterhub("predict", reference, "a good movie", "--json", *options)
    return json.loads(out) if code == 0 else err


def placed(way: str, home: Path) -> str:
    """Bring the adapter to its place, and return the reference."""
    if way == "run":
        return "run"
    if way == "moved run":
        return str(shutil.move("run", home.parent / "elsewhere"))
    if way == "copy":
        return str(shutil.copytree("run/adapter", home.parent / "copy"))
    if way.startswith("./run"):
        return str(home / "run")
    ah.publish("run", "polite")
    return "polite" if way == "published" else str(ah.pull("polite", home.parent / "pulled"))


def test_the_backbone_is_found_again(trained_here, adapterhub, monkeypatch, tmp_path):
    expected = predicted(adapterhub, "run")
    assert isinstance(expected, dict), expected
    for number, way in enumerate(WAYS):
        home = Path(shutil.copytree(trained_here, tmp_path / f"{number}" / "home"))
        shutil.rmtree(home / "my-bert")
        monkeypatch.chdir(home)
        reference = placed(way, home)
        if way != "run":
            (tmp_path / "there").mkdir(exist_ok=True)
            monkeypatch.chdir(tmp_path / "there")
        assert predicted(adapterhub, reference) == expected, way


def test_it_is_asked_for_once_where_it_is_not_known(
    trained_here, backbone, adapterhub, monkeypatch, tmp_path
):
    expected = predicted(adapterhub, "run")
    shutil.rmtree(state_folder())  # another machine
    pulled = shutil.copytree("run/adapter", tmp_path / "pulled")
    name = json.loads((pulled / "adapter.json").read_bytes())["backbone"]["id"]
    error = predicted(adapterhub, pulled)
    assert "the backbone 'my-bert' was not found: it is not on the Hub" in error
    assert f"whose fingerprint starts with {name.rpartition('--')[2]}" in error
    assert "try: --backbone FOLDER" in error
    there = shutil.copytree(backbone, tmp_path / "there")
    assert predicted(adapterhub, pulled, "--backbone", there) == expected
    assert predicted(adapterhub, pulled) == expected, "it is remembered"
    shutil.rmtree(there)
    assert f"was in {there}, which does not exist any more" in predicted(adapterhub, pulled)


def test_other_weights_in_the_remembered_folder_are_refused(
    trained_here, adapterhub, backbones, tmp_path
):
    shutil.rmtree("my-bert")
    model, tokenizer = ah.load_backbone(str(backbones("bert")))
    next(model.parameters()).data.add_(1.0)
    for part in (model, tokenizer):
        part.save_pretrained("my-bert")
    copy = shutil.copytree("run/adapter", tmp_path / "copy")
    assert "was trained on a different backbone" in predicted(adapterhub, copy)


def test_what_another_backbone_was_used_for_is_not_remembered(trained_here, backbone, tmp_path):
    shutil.rmtree(state_folder())
    other = shutil.copytree(backbone, tmp_path / "other")
    model, _ = ah.load_backbone(str(other), task="classification", labels=["0", "1"])
    ah.load(model, "./run", any_backbone=True)
    assert not (state_folder() / "backbones").exists()

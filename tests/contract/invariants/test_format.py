"""The file format is stable across versions, hash seeds and machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import adapterhub as ah
from adapterhub.config.options import is_neutral, options_of
from adapterhub.errors import FileError
from adapterhub.files.native import Saved
from adapterhub.methods import METHODS
from adapterhub.methods.common.base import dump_methods, parse_methods, restore_methods
from tests.kit import tiny_models

OPTIONS_V1 = Path(__file__).parents[2] / "golden" / "options_v1.json"


def test_unknown_options_with_neutral_values_are_ignored():
    """A neutral value (null, false, empty) of an unknown option has no effect."""
    (saved,) = dump_methods(parse_methods("lora(rank=3)"))
    later = {"lora": {**saved["lora"], "later": None, "flag": False, "names": [], "map": {}}}
    assert restore_methods([later], "x") == parse_methods("lora(rank=3)")


def test_unknown_options_and_methods_ask_for_a_newer_version(tmp_path, monkeypatch):
    """One error lists every unknown option and method; the model is unchanged."""
    unknown = [{"lora": {"rank": 3, "later": 1, "more": "x"}}, {"telepathy": {"depth": 2}}]
    for methods, offenders in ((unknown, 3), ([{"lora": {"zero": 0}}], 1)):
        with pytest.raises(FileError, match="needs a newer adapterhub") as error:
            restore_methods(methods, "x")
        assert len(error.value.offenders) == offenders
        assert "telepathy" in str(error.value) or offenders == 1
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "lora")
    manifest = adapter.manifest
    later = ({"lora": {**dump_methods(parse_methods("lora"))[0]["lora"], "later": 7}},)
    monkeypatch.setattr(adapter, "manifest", lambda: replace(manifest(), methods=later))
    adapter.save(tmp_path / "a")
    adapter.detach()
    with pytest.raises(FileError, match="the option 'later' of lora"):
        ah.load(model, tmp_path / "a")
    assert not any("adapterhub" in key for key in model.state_dict())


def omitted_of(method):
    """Return the options that files contain only if they are not at their defaults."""
    return {field.name for field in fields(method) if field.metadata.get("omitted")}


def test_options_added_after_version_1_are_neutral_by_default():
    """An older reader can ignore it, and an older file keeps its meaning."""
    first = json.loads(OPTIONS_V1.read_text(encoding="utf-8"))
    assert len(first) > 20
    assert first.keys() <= METHODS.keys()
    for method in METHODS:
        options = {option.name: option.default for option in options_of(METHODS[method])}
        (spec,) = dump_methods(parse_methods(method))
        assert spec[method].keys() == options.keys() - omitted_of(METHODS[method])
        names = set(first.get(method, options))
        assert names <= options.keys(), f"{method} lost an option that saved files contain"
        for name in options.keys() - names - omitted_of(METHODS[method]):
            assert is_neutral(options[name]), f"{method}.{name} must be null, false or empty"


TRAIN = """
import sys
sys.argv = ["adapterhub", *sys.argv[1:]]
from adapterhub.cli import main
main()
"""


@pytest.mark.apart
def test_saved_bytes_do_not_depend_on_the_hash_seed(backbone, data, tmp_path):
    """The files contain no set order, no time and no path of the machine."""
    runs = []
    for seed in ("0", "4242"):
        folder = tmp_path / f"a folder of seed {seed}" / "run"
        words = ["train", "--backbone", backbone, "--train", data[0], "--eval", data[1],
                 "--method", "[lora(rank=2), bitfit, prompt(length=2)]", "--output", folder,
                 "train.epochs=1", "train.tensorboard=false", "train.report=false"]  # fmt: skip
        path = os.pathsep.join([str(Path(ah.__file__).parents[1]), *sys.path])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        command = [sys.executable, "-c", TRAIN, *map(str, words)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        runs.append((folder, subprocess.Popen(command, env=environment, **quiet)))
    for _, process in runs:
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
    first, second = (folder / "adapter" for folder, _ in runs)
    names = sorted(path.name for path in first.iterdir())
    assert names == ["README.md", "adapter.json", "adapter.safetensors"]
    for name in names:
        written = (first / name).read_bytes()
        assert written == (second / name).read_bytes(), name
        assert str(tmp_path).encode() not in written
        assert str(backbone).encode() not in written


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("/home/ann/models/bert-small", "bert-small--"),
        ("/data/hub/models--acme--bert/snapshots/" + "ab" * 20, "acme/bert"),
        ("C:\\models\\my bert (2)", "my-bert-2--"),
        ("../bert", "bert--"),
        ("~/bert", "bert--"),
        ("acme/bert", "acme/bert"),
        ("", "unnamed-bert--"),
    ],
)
def test_a_manifest_contains_no_local_path(tmp_path, given, stored):
    """A manifest has the Hub id and commit, or a local path's last component and a digest."""
    model = tiny_models.model("bert")
    model.config._name_or_path = given
    ah.attach(model, "lora").save(tmp_path / "a")
    backbone = Saved.at(tmp_path / "a").manifest.backbone
    digest = backbone.fingerprint.partition("-")[2][:12]
    assert backbone.id == (stored + digest if stored.endswith("--") else stored)
    assert digest
    assert backbone.revision == ("ab" * 20 if "snapshots" in given else None)


def test_the_problem_type_of_a_head_is_restored(tmp_path):
    """problem_type is restored with the head, so the loss stays the same."""
    model = tiny_models.model("bert", problem_type="multi_label_classification")
    ah.attach(model, "lora").save(tmp_path / "a")
    again = tiny_models.model("bert", num_labels=5)
    ah.load(again, tmp_path / "a")
    assert again.config.problem_type == "multi_label_classification"
    targets = torch.eye(3)
    assert again(**tiny_models.batch(), labels=targets).loss.isfinite()

"""The file format is stable across versions, hash seeds and machines; golden files still load."""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import adapterhub as ah
from adapterhub.anatomy.backbone import Backbone
from adapterhub.config.options import is_neutral, options_of
from adapterhub.errors import FileError
from adapterhub.files.native import Saved, write_adapter
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


def test_the_defaults_of_each_method_are_written_as_before():
    names = sorted(json.loads(OPTIONS_V1.read_text(encoding="utf-8")))
    written = json.dumps([dump_methods(parse_methods(name)) for name in names], sort_keys=True)
    digest = hashlib.sha256(written.encode()).hexdigest()
    assert digest.startswith("d244e928fc53"), "an option, or its default, is written in another way"


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


def test_the_problem_type_and_the_number_of_labels_of_a_head_are_restored(tmp_path):
    """With the head, so the loss stays the same; detached, the model has its own."""
    model = tiny_models.model("bert", problem_type="multi_label_classification")
    ah.attach(model, "lora").save(tmp_path / "a")
    again = tiny_models.model("bert", num_labels=5)
    adapter = ah.load(again, tmp_path / "a")
    assert again.config.problem_type == "multi_label_classification"
    assert again.num_labels == 3
    assert again(**tiny_models.batch(), labels=torch.eye(3)).loss.isfinite()
    adapter.detach()
    assert again.num_labels == again(**tiny_models.batch()).logits.shape[-1] == 5


GOLDEN = Path(__file__).parents[2] / "golden"
FOLDER = GOLDEN / "v1_models"
SHA256 = {
    "head": "a6dd6b7d2da1fe176e00b2ff4270863a3f9bb2f9c28ee7cb68a97d4b2cbe304c",
    "lora": "ecc5fab6f595d005416505d1ee0f83b424b9b1c6aaf8b8f30046707a05424576",
    "mam": "5968c12166377987e7efb7d7acd6d5d9de79572251963556abb3c95e37761ac5",
    "prompt": "aabc4ce1f2a8da180e1c6a3b5b9911ec2a843f2e3a8c6d9deead5a58ef5d8ff9",
    "several": "dec7a8cea4de8417e2ae4f10d2f2b57c46afcd3e60fe9f87156eb7b70ff8b9fa",
    "tokens": "1db0a4632497ace92347aee40758e68bbb97ed4c44ee271aff5f77ea3722fc75",
}


spec = importlib.util.spec_from_file_location("make", GOLDEN / "make_v1_models.py")
make = importlib.util.module_from_spec(spec)
sys.modules["make"] = make
spec.loader.exec_module(make)


@pytest.mark.parametrize("name", make.CASES)
def test_a_golden_adapter_computes_the_recorded_logits_and_is_rewritten_to_the_byte(name, tmp_path):
    """The backbone and the folder are enough, for files of an older release."""
    write_adapter(tmp_path / "again", *Saved.at(FOLDER / name).read())
    for file in ("adapter.json", "adapter.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (FOLDER / name / file).read_bytes()
    case = make.CASES[name]
    model = make.backbone_of(case)
    bare = {k: v.clone() for k, v in model.state_dict().items()}
    adapter = ah.load(model, FOLDER / name)
    expected = torch.tensor(json.loads((FOLDER / f"{name}.json").read_text("utf-8"))["logits"])
    logits = torch.tensor(make.logits(model, case))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert adapter.labels == (("no", "yes", "vielleicht später") if adapter.head else ())
    if case.tokens:
        tokenizer = Backbone.of(model).tokenizer.tokenizer
        assert [tokenizer.convert_ids_to_tokens(64 + i) for i in (0, 1)] == list(case.tokens)
        assert tokenizer.chat_template == make.TEMPLATE
    else:
        ah.activate(model)
        assert not torch.allclose(torch.tensor(make.logits(model, case)), expected, atol=1e-3)
    adapter.detach()
    assert all(torch.equal(v, bare[k]) for k, v in model.state_dict().items())


def test_the_golden_adapters_are_unchanged_and_cover_the_format():
    assert sorted(SHA256) == sorted(p.name for p in FOLDER.iterdir() if p.is_dir())
    manifests = [Saved.at(FOLDER / name).read()[0] for name in SHA256]
    for name, expected in SHA256.items():
        manifest = (FOLDER / name / "adapter.json").read_bytes()  # it has the sha256 of the tensors
        assert hashlib.sha256(manifest).hexdigest() == expected
    assert any(m.tokens and m.chat_template and m.tokenizer for m in manifests)
    assert any(m.head and m.labels for m in manifests)
    methods = {name for m in manifests for spec in m.methods for name in spec}
    assert methods >= {"lora", "mam", "prompt", "head"}

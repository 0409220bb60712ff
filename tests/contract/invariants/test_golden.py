"""Golden files of past releases load, compute the same outputs, and are rewritten byte for byte."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

import adapterhub as ah
from adapterhub.backbones.tokenizer import tokenizer_snapshot
from adapterhub.files.native import read_adapter, write_adapter

GOLDEN = Path(__file__).parents[2] / "golden"
FOLDER = GOLDEN / "v1_models"
SHA256 = {
    "head": "00c8c35ef59e6bf8ec5e52f2249588d7027fce68529b38ffc7190b7052c545ff",
    "lora": "c290c7c8c9354cc459bd73989594889a07f1e3f09ac965a8b4ab9ff5ea847e6b",
    "mam": "f5a608bf576406ede230c33fbde2c6dfd81630a4a673c3e88423eccf0a972ba9",
    "prompt": "72c3392229c0565e92a00f4e7696fad8a1a4e9f1fc8cee25ece7dbe346c16407",
    "several": "76f8845ff628cdd5a66285708b035b416537d2ca6bd40a30442cbceece30f4b3",
    "tokens": "654c864dcb83567524b8c5905f67be2c9f8aaece66d52a5ef573efedac97fa38",
}


def load_script():
    spec = importlib.util.spec_from_file_location("make", GOLDEN / "make_v1_models.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["make"] = module
    spec.loader.exec_module(module)
    return module


make = load_script()


def test_the_golden_files_are_unchanged():
    digests = {
        name: hashlib.sha256((FOLDER / name / "adapter.json").read_bytes()).hexdigest()
        for name in make.CASES
    }
    assert digests == SHA256, "adapter.json contains the sha256 of the tensors"
    assert sorted(SHA256) == sorted(p.name for p in FOLDER.iterdir() if p.is_dir())


@pytest.mark.parametrize("name", make.CASES)
def test_a_golden_adapter_computes_the_recorded_logits(name):
    """The backbone and the folder are enough, for files of an older release."""
    case = make.CASES[name]
    model = make.backbone_of(case)
    bare = {k: v.clone() for k, v in model.state_dict().items()}
    adapter = ah.load(model, FOLDER / name)
    expected = torch.tensor(json.loads((FOLDER / f"{name}.json").read_text("utf-8"))["logits"])
    logits = torch.tensor(make.logits(model, case))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert adapter.labels == (("no", "yes", "vielleicht später") if adapter.head else ())
    if case.tokens:
        tokenizer = tokenizer_snapshot(model).tokenizer
        assert [tokenizer.convert_ids_to_tokens(64 + i) for i in (0, 1)] == list(case.tokens)
        assert tokenizer.chat_template == make.TEMPLATE
    else:
        ah.activate(model)
        assert not torch.allclose(torch.tensor(make.logits(model, case)), expected, atol=1e-3)
    adapter.detach()
    assert all(torch.equal(v, bare[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("name", make.CASES)
def test_a_golden_adapter_is_rewritten_byte_for_byte(name, tmp_path):
    """The bytes are canonical."""
    manifest, tensors = read_adapter(FOLDER / name)
    write_adapter(tmp_path / "again", manifest, tensors)
    for file in ("adapter.json", "adapter.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (FOLDER / name / file).read_bytes()


def test_the_golden_adapters_cover_the_format():
    manifests = [read_adapter(FOLDER / name)[0] for name in make.CASES]
    assert any(m.tokens and m.chat_template and m.tokenizer for m in manifests)
    assert any(m.head and m.labels for m in manifests)
    methods = {name for m in manifests for spec in m.methods for name in spec}
    assert methods >= {"lora", "mam", "prompt", "head"}

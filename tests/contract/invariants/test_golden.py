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
from adapterhub.anatomy.backbone import Backbone
from adapterhub.files.native import Saved, write_adapter

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
        tokenizer = Backbone.of(model).tokenizer.tokenizer
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
    write_adapter(tmp_path / "again", *Saved.at(FOLDER / name).read())
    for file in ("adapter.json", "adapter.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (FOLDER / name / file).read_bytes()


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

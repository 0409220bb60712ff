"""Reparametrized methods train a network, and are saved in their inference form, without it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_file

import adapterhub as ah
from tests.kit import tiny_models
from tests.kit.data import train
from tests.kit.tiny_models import logits

INFERENCE_FORMS = {
    "prefix(length=4, reparametrize=True, middle=6)": "prefix(length=4)",
    "p-tuning(length=4)": "prompt(length=4)",
    "p-tuning(length=4, encoder='lstm', middle=6)": "prompt(length=4)",
}
cells = pytest.mark.parametrize(
    ("spec", "architecture"),
    [(s, a) for s in INFERENCE_FORMS for a in ("bert", "gpt2", "llama", "bart")],
)


@cells
def test_an_adapter_is_saved_and_loaded_in_its_inference_form(spec, architecture, tmp_path):
    model = tiny_models.model(architecture)
    adapter = ah.attach(model, spec)
    tiny_models.scramble(adapter)
    expected = logits(model)
    torch.manual_seed(0)
    draw = torch.rand(1)
    torch.manual_seed(0)
    adapter.save(tmp_path / "adapter")
    assert torch.equal(torch.rand(1), draw), "saving uses no random numbers"
    plain = ah.attach(tiny_models.model(architecture), INFERENCE_FORMS[spec])
    saved = load_file(tmp_path / "adapter" / "adapter.safetensors")
    assert {n: t.shape for n, t in saved.items()} == {
        n: t.shape for n, t in plain.tensors().items()
    }
    again = tiny_models.model(architecture)
    loaded = ah.load(again, tmp_path / "adapter")
    assert {m.name for m in loaded.methods} == {m.name for m in plain.methods}
    assert torch.equal(logits(again), expected)
    losses = train(loaded, steps=10)
    assert losses[-1] < losses[0], "the loaded adapter trains"


@cells
def test_every_parameter_of_the_network_trains(spec, architecture):
    torch.manual_seed(0)
    model = tiny_models.model(architecture)
    adapter = ah.attach(model, spec)
    assert adapter.count() == adapter.methods[0].count(adapter.anatomy)
    names = [n for n, _ in model.named_parameters(remove_duplicate=False) if "adapterhub" in n]
    assert (
        len(names)
        == len(set(names))
        == sum(len(list(p.module.parameters())) for p in adapter.placed)
    )
    before = {n: t.detach().clone() for n, t in adapter.tensors().items()}
    losses = train(adapter, steps=20)
    assert losses[-1] < losses[0]
    for name, tensor in adapter.tensors().items():
        assert not torch.equal(tensor, before[name]), name


@cells
def test_copies_have_their_own_network(spec, architecture):
    model = tiny_models.model(architecture)
    adapter = ah.attach(model, spec)
    tiny_models.scramble(adapter)
    expected = logits(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(copied), expected)
        parameters = {n: p for n, p in copied.named_parameters() if "adapterhub" in n}
        assert not {id(p) for p in parameters.values()} & {id(p) for p in adapter.parameters()}
        with torch.no_grad():
            next(p for n, p in parameters.items() if "trunk.prefix" in n or "prompt" in n).add_(1)
        assert not torch.equal(logits(copied), expected)
        assert torch.equal(logits(model), expected)
        ah.detach(copied)


def test_the_layers_of_a_prefix_share_one_network():
    adapter = ah.attach(tiny_models.model("bart"), "prefix(reparametrize=True, middle=6)")
    trunks = {n for n in adapter.tensors() if "trunk.prefix" in n}
    assert trunks == {
        f"{site}.prefix.trunk.prefix"
        for site in ("encoder.0.attn.kv", "decoder.0.attn.kv", "decoder.0.cross.kv")
    }


def test_a_network_in_a_composition_is_saved_in_its_inference_form(tmp_path):
    model = tiny_models.model("bert")
    adapter = ah.attach(model, ["prefix(reparametrize=True, middle=6)", "lora"])
    tiny_models.scramble(adapter)
    expected = logits(model)
    adapter.save(tmp_path / "adapter")
    again = tiny_models.model("bert")
    loaded = ah.load(again, tmp_path / "adapter")
    assert [m.name for m in loaded.methods] == ["prefix", "lora"]
    assert not loaded.methods[0].reparametrize
    assert torch.equal(logits(again), expected)

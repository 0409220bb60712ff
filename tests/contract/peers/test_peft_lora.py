"""Outputs of lora, rslora, dora and pissa equal those of `peft` with the same tensors."""

from __future__ import annotations

import copy

import pytest
import torch

import adapterhub as ah
from tests.kit import tiny_models

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

LORA = {
    "bert": (["attn.q", "attn.v"], ["query", "value"]),
    "roberta": (["attn.k", "ffn.up"], ["key", "intermediate.dense"]),
    "distilbert": (["attn.q", "attn.v"], ["q_lin", "v_lin"]),
    "gpt2": (["attn.qkv"], ["c_attn"]),
    "llama": (["attn.q", "attn.v", "ffn.down"], ["q_proj", "v_proj", "down_proj"]),
    "albert": (["attn.q", "ffn.up"], ["query", "ffn"]),
    "deberta-v2": (["attn.q", "attn.v"], ["query_proj", "value_proj"]),
    "modernbert": (["attn.qkv", "ffn.gate_up"], ["Wqkv", "Wi"]),
    "gpt_neox": (["attn.qkv", "ffn.up"], ["query_key_value", "dense_h_to_4h"]),
    "phi3": (["attn.qkv", "ffn.gate_up"], ["qkv_proj", "gate_up_proj"]),
    "mixtral": (["attn.q", "attn.v"], ["q_proj", "v_proj"]),
    "t5": (["attn.q", "attn.v", "cross.q", "cross.v"], ["q", "v"]),
    "bart": (["attn.o", "cross.k"], [r".*(self_attn\.out_proj|encoder_attn\.k_proj)"]),
}


def modules_with(model, attribute):
    return [(name, m) for name, m in model.named_modules() if hasattr(m, attribute)]


def compare(
    architecture, spec, sites, targets, copy_more=lambda module, layer: None, atol=1e-5, **config
):
    """Copy our tensors into a peft model, and compare the logits."""
    backbone = tiny_models.model(architecture)
    ours = copy.deepcopy(backbone)
    (name, options), *_ = spec.items()
    adapter = ah.attach(ours, {name: {"sites": sites, **options}})
    fixed = {n: t.clone() for n, t in adapter.tensors().items() if not t.requires_grad}
    tiny_models.scramble(adapter)
    for name_, tensor in fixed.items():
        adapter.tensors()[name_].copy_(tensor)
    targets = targets[0] if targets[0].startswith(".") else targets
    config = peft.LoraConfig(
        target_modules=targets, fan_in_fan_out=architecture == "gpt2", **config
    )
    theirs = peft.get_peft_model(backbone, config).eval()
    hosts = {p.site.host: p.module for p in adapter.placed}
    layers = modules_with(theirs, "lora_A")
    assert len(layers) == len(hosts) > 0
    for name, layer in layers:
        module = hosts[name.removeprefix("base_model.model.")]
        layer.lora_A["default"].weight.data.copy_(module.A)
        layer.lora_B["default"].weight.data.copy_(module.B)
        copy_more(module, layer)
    for name, module in adapter.head.own.items():
        theirs.base_model.model.get_submodule(name).load_state_dict(module.state_dict())
    with torch.no_grad():
        bare = tiny_models.model(architecture)(**tiny_models.batch()).logits
        expected = theirs(**tiny_models.batch()).logits
        logits = ours(**tiny_models.batch()).logits
    assert not torch.allclose(logits, bare, atol=1e-2)
    torch.testing.assert_close(logits, expected, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("architecture", LORA)
def test_lora_equals_peft(architecture):
    compare(
        architecture, {"lora": {"rank": 4, "alpha": 12}}, *LORA[architecture], r=4, lora_alpha=12
    )


@pytest.mark.parametrize("architecture", LORA)
def test_rslora_equals_peft(architecture):
    spec = {"rslora": {"rank": 4, "alpha": 3}}
    compare(architecture, spec, *LORA[architecture], r=4, lora_alpha=3, use_rslora=True)


def test_ranks_by_site_equal_peft():
    spec = {"lora": {"rank": 4, "alpha": 12, "ranks": {"attn.q": 2, "encoder.1.attn.v": 3}}}
    ranks = {r".*query": 2, r".*layer\.1\..*value": 3}
    compare("bert", spec, *LORA["bert"], r=4, lora_alpha=12, rank_pattern=ranks)


@pytest.mark.parametrize("architecture", LORA)
def test_dora_equals_peft(architecture):
    def copy_magnitude(module, layer):
        layer.lora_magnitude_vector["default"].weight.data.copy_(module.magnitude)

    spec = {"dora": {"rank": 4, "alpha": 12}}
    options = {"r": 4, "lora_alpha": 12, "use_dora": True}
    compare(architecture, spec, *LORA[architecture], copy_magnitude, **options)


@pytest.mark.parametrize("architecture", LORA)
def test_pissa_equals_peft(architecture):
    """peft subtracts the principal components from its own copy of W."""
    spec = {"pissa": {"rank": 4, "alpha": 12, "iterations": 0}}
    options = {"r": 4, "lora_alpha": 12, "init_lora_weights": "pissa"}
    compare(architecture, spec, *LORA[architecture], atol=1e-4, **options)

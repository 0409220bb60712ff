"""LoRA and its siblings compute what `peft` computes, on the same backbone with the same
tensors."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch

import adapterhub as ah

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

LORA = {
    "bert": (["attn.q", "attn.v"], ["query", "value"]),
    "roberta": (["attn.k", "ffn.up"], ["key", "intermediate.dense"]),
    "distilbert": (["attn.q", "attn.v"], ["q_lin", "v_lin"]),
    "gpt2": (["attn.qkv"], ["c_attn"]),
    "llama": (["attn.q", "attn.v", "ffn.down"], ["q_proj", "v_proj", "down_proj"]),
    "t5": (["attn.q", "attn.v", "cross.q", "cross.v"], ["q", "v"]),
    "bart": (["attn.o", "cross.k"], [r".*(self_attn\.out_proj|encoder_attn\.k_proj)"]),
}


def modules_with(model, attribute):
    return [(name, m) for name, m in model.named_modules() if hasattr(m, attribute)]


@pytest.mark.parametrize("architecture", LORA)
def test_lora(architecture):
    sites, targets = LORA[architecture]
    backbone = tiny.model(architecture)
    ours = copy.deepcopy(backbone)
    adapter = ah.attach(ours, {"lora": {"rank": 4, "alpha": 12, "sites": sites}})
    tiny.scramble(adapter)
    targets = targets[0] if targets[0].startswith(".") else targets
    config = peft.LoraConfig(
        r=4, lora_alpha=12, target_modules=targets, fan_in_fan_out=architecture == "gpt2"
    )
    theirs = peft.get_peft_model(backbone, config).eval()
    hosts = {p.site.host: p.module for p in adapter.placed}
    layers = modules_with(theirs, "lora_A")
    assert len(layers) == len(hosts) > 0
    for name, layer in layers:
        own = hosts[name.removeprefix("base_model.model.")]
        layer.lora_A["default"].weight.data.copy_(own.A)
        layer.lora_B["default"].weight.data.copy_(own.B)
    for name, module in adapter.head.own.items():
        theirs.base_model.model.get_submodule(name).load_state_dict(module.state_dict())
    with torch.no_grad():
        expected = theirs(**tiny.batch()).logits
        torch.testing.assert_close(ours(**tiny.batch()).logits, expected, atol=1e-6, rtol=1e-5)

"""Norm tuning computes what `peft` computes, on the same backbone with the same tensors."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch

import adapterhub as ah

peft = pytest.importorskip("peft")
# peft copies a norm whatever it is, and says so of those that it has no name for.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Unsupported layer type.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]

NORMS = {
    "bert": "LayerNorm",
    "gpt2": r".*ln_(1|2|f)",
    "llama": r".*(layernorm|model\.norm)",
    "t5": r".*layer_norm",
    "mbart": r".*(layer_norm|layernorm_embedding)",
}


def logits(model):
    with torch.no_grad():
        return model(**tiny.batch()).logits


def same_head(adapter, theirs):
    for name, module in adapter.head.own.items():
        theirs.base_model.model.get_submodule(name).load_state_dict(module.state_dict())


@pytest.mark.parametrize("architecture", NORMS)
def test_norms(architecture):
    backbone = tiny.model(architecture)
    ours = copy.deepcopy(backbone)
    adapter = ah.attach(ours, "norms")
    tiny.scramble(adapter, std=2.0)
    target = NORMS[architecture]
    config = peft.LNTuningConfig(target_modules=target if "." in target else [target])
    theirs = peft.get_peft_model(backbone, config).eval()
    layers = [m for m in theirs.modules() if hasattr(m, "ln_tuning_layers")]
    assert sum(p.numel() for m in layers for p in m.ln_tuning_layers.parameters()) > 0
    own = {n: p for n, p in ours.named_parameters() if "adapterhub" not in n}
    moved = 0
    for name, module in theirs.base_model.model.named_modules():
        if hasattr(module, "ln_tuning_layers"):
            for key, parameter in module.ln_tuning_layers["default"].named_parameters():
                parameter.data.copy_(own[f"{name}.{key}"])
                moved += parameter.numel()
    assert moved == adapter.count()
    same_head(adapter, theirs)
    assert not torch.allclose(logits(ours), logits(tiny.model(architecture)), atol=1e-3)
    torch.testing.assert_close(logits(ours), logits(theirs), atol=1e-6, rtol=1e-5)

"""Outputs of norms and ia3 equal those of `peft` with the same tensors."""

from __future__ import annotations

import copy

import pytest
import torch

import adapterhub as ah
from tests.kit import tiny_models
from tests.kit.tiny_models import logits

peft = pytest.importorskip("peft")
# peft copies any norm, and warns about classes that it does not list.
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


def copy_head(adapter, theirs):
    for name, module in adapter.head.own.items():
        theirs.base_model.model.get_submodule(name).load_state_dict(module.state_dict())


@pytest.mark.parametrize("architecture", NORMS)
def test_norms_equal_peft(architecture):
    backbone = tiny_models.model(architecture)
    ours = copy.deepcopy(backbone)
    adapter = ah.attach(ours, "norms")
    tiny_models.scramble(adapter, std=2.0)
    target = NORMS[architecture]
    config = peft.LNTuningConfig(target_modules=target if "." in target else [target])
    theirs = peft.get_peft_model(backbone, config).eval()
    layers = [m for m in theirs.modules() if hasattr(m, "ln_tuning_layers")]
    assert sum(p.numel() for m in layers for p in m.ln_tuning_layers.parameters()) > 0
    parameters = {n: p for n, p in ours.named_parameters() if "adapterhub" not in n}
    copied = 0
    for name, module in theirs.base_model.model.named_modules():
        if hasattr(module, "ln_tuning_layers"):
            for key, parameter in module.ln_tuning_layers["default"].named_parameters():
                parameter.data.copy_(parameters[f"{name}.{key}"])
                copied += parameter.numel()
    assert copied == adapter.count()
    copy_head(adapter, theirs)
    assert not torch.allclose(logits(ours), logits(tiny_models.model(architecture)), atol=1e-3)
    torch.testing.assert_close(logits(ours), logits(theirs), atol=1e-6, rtol=1e-5)


IA3 = {
    # attention.output.dense is not a target
    "bert": (r".*(key|value|\d\.output\.dense)", r".*\d\.output\.dense"),
    "llama": (["k_proj", "v_proj", "down_proj"], ["down_proj"]),
    "t5": (["k", "v", "wo"], ["wo"]),
    "bart": (["k_proj", "v_proj", "fc2"], ["fc2"]),
}


@pytest.mark.parametrize("architecture", IA3)
def test_ia3_equals_peft(architecture):
    targets, inputs = IA3[architecture]
    backbone = tiny_models.model(architecture)
    ours = copy.deepcopy(backbone)
    adapter = ah.attach(ours, "ia3")
    tiny_models.scramble(adapter)
    config = peft.IA3Config(target_modules=targets, feedforward_modules=inputs)
    theirs = peft.get_peft_model(backbone, config).eval()
    hosts = {p.site.host: p.module for p in adapter.placed}
    layers = [(n, m) for n, m in theirs.named_modules() if hasattr(m, "ia3_l")]
    assert len(layers) == len(hosts) > 0
    for name, layer in layers:
        parameter = layer.ia3_l["default"]
        parameter.data.copy_(hosts[name.removeprefix("base_model.model.")].scale.view_as(parameter))
    copy_head(adapter, theirs)
    assert not torch.allclose(logits(ours), logits(tiny_models.model(architecture)), atol=1e-2)
    torch.testing.assert_close(logits(ours), logits(theirs), atol=2e-6, rtol=1e-5)


def test_ia3_on_a_fused_projection_equals_peft():
    """peft scales all of GPT-2's c_attn; with ones for the query, that equals our ia3."""
    backbone = tiny_models.model("gpt2")
    ours = copy.deepcopy(backbone)
    adapter = ah.attach(ours, "ia3")
    tiny_models.scramble(adapter)
    targets = ["c_attn", "mlp.c_proj"]
    config = peft.IA3Config(
        target_modules=targets, feedforward_modules=targets[1:], fan_in_fan_out=True
    )
    theirs = peft.get_peft_model(backbone, config).eval()
    scales = {p.site.id: p.module.scale for p in adapter.placed}
    for number, block in enumerate(theirs.base_model.model.transformer.h):
        key, value, middle = (
            scales[f"decoder.{number}.{r}"] for r in ("attn.k", "attn.v", "ffn.down")
        )
        whole = torch.cat([torch.ones_like(key), key, value])
        block.attn.c_attn.ia3_l["default"].data.copy_(whole[:, None])
        block.mlp.c_proj.ia3_l["default"].data.copy_(middle[None])
    copy_head(adapter, theirs)
    torch.testing.assert_close(logits(ours), logits(theirs), atol=2e-6, rtol=1e-5)

"""Tiny random mixtures of experts, each as transformers builds it: what tests of experts run on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import every_type
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import adapterhub as ah

# Gated with the matrices as (d_out, d_in); transposed with biases (gpt_oss); transposed and called
# for all experts at once (llama4_text); without a gate (nemotron_h); beside shared experts
# (deepseek_v3, glm4_moe, qwen2_moe); in some layers only (jamba, nemotron_h).
TYPES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "glm4_moe",
    "llama4_text",
    "olmoe",
    "granitemoe",
    "jamba",
    "nemotron_h",
    "phimoe",
)
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
TRANSPOSED = ("gpt_oss", "llama4_text")
ROUTED = tuple(t for t in TYPES if t != "llama4_text")  # by tokens: rows can have own adapters
EXPERTS = "lora(sites=[ffn.experts.*], rank=3)"


@cache
def _built(model_type: str) -> PreTrainedModel:
    auto = every_type.autos(model_type, every_type.ADAPTED)[0]
    torch.manual_seed(0)
    model = every_type.build(model_type, auto, tiny=True)
    assert model is not None
    return model


def expert_model(model_type: str, experts: str = "eager") -> PreTrainedModel:
    """Return the model of a type, of which all tests share one, without adapters.

    Args:
        model_type: a type.
        experts: how it multiplies by the weights of experts.
    """
    model = _built(model_type)
    if ah.adapters(model):  # of a test that failed
        ah.detach(model)
    model.zero_grad()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = experts
    return model.eval()


def logits(model: PreTrainedModel, rows: Iterable[int] = range(3)) -> Tensor:
    """Return the logits of a model for texts that do not change."""
    ids = torch.arange(4 * 7).view(4, 7).mul(5).remainder(50).add(6)
    out: Tensor = model(input_ids=ids[list(rows)]).logits
    return out


def redraw(adapter: nn.Module | object, seed: int = 0) -> None:
    """Give an adapter other values, far from those that change nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter.parameters():  # type: ignore[attr-defined]
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.2 * noise)


def holders(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the modules that hold the weights of experts."""
    for module in model.modules():
        down = module._parameters.get("down_proj")
        if down is not None and down.ndim == 3:
            yield module

"""Routed experts against peft's `target_parameters`: equal tensors give equal outputs."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from expert_models import expert_model, logits, redraw

import adapterhub as ah
from adapterhub.errors import MismatchError

# peft asks transformers for an attribute that it renames.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
RANK = 3
# peft reads how matrices are stored from an attribute, which llama4 does not have.
TYPES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe", "nemotron_h")


def peft_model(model, alpha):
    parameters = {
        f"{s.host.rpartition('.')[2]}.{s.held.parameter}"
        for s in ah.anatomy_of(model).sites.values()
        if s.held and s.held.experts
    }
    config = peft.LoraConfig(
        r=RANK, lora_alpha=alpha, target_modules=[], target_parameters=sorted(parameters)
    )
    return peft.get_peft_model(copy.deepcopy(model), config)


def wrapper(wrapped, site):
    """Return peft's wrapper of a parameter; those of one module are nested."""
    module = wrapped.get_submodule(f"base_model.model.{site.host}")
    while module.parameter_name != site.held.parameter:
        module = module.base_layer
    return module


@pytest.mark.parametrize("model_type", TYPES)
def test_outputs_and_gradients_are_those_of_peft(model_type):
    model = expert_model(model_type)
    theirs = peft_model(model, alpha=5)
    adapter = ah.attach(model, f"lora(sites=[ffn.experts.*], rank={RANK}, alpha=5)")
    redraw(adapter)
    pairs = []
    for placed in adapter.placed:
        A, B = placed.module.A, placed.module.B
        peer = wrapper(theirs, placed.site)
        low, high = peer.lora_A["default"].weight, peer.lora_B["default"].weight
        with torch.no_grad():
            low.copy_(A.reshape(low.shape))  # (experts rank, d_in)
            high.copy_(B.permute(1, 2, 0).reshape(high.shape))  # (d_out, rank experts)
        pairs.append((A, B, low, high))
    assert pairs
    ours = logits(model)
    found = logits(theirs)
    torch.testing.assert_close(ours, found, atol=2e-5, rtol=1e-4)
    ours.square().sum().backward()
    found.square().sum().backward()
    for A, B, low, high in pairs:
        torch.testing.assert_close(A.grad.reshape(low.shape), low.grad, atol=1e-3, rtol=1e-3)
        expected = B.grad.permute(1, 2, 0).reshape(high.shape)
        torch.testing.assert_close(expected, high.grad, atol=1e-3, rtol=1e-3)
    assert adapter.count() == sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    adapter.detach()


def test_seven_types_are_compared():
    assert len(set(TYPES)) == 7


@pytest.mark.parametrize("method", ["lora", "ia3"])
def test_export_of_held_weights_is_refused(method, tmp_path):
    model = expert_model("mixtral")
    adapter = ah.attach(model, f"{method}(sites=[ffn.experts.*, ffn.router])")
    with pytest.raises(MismatchError, match="cannot be exported") as error:
        adapter.export(tmp_path / "peft")
    assert error.value.offenders == tuple(
        f"{method} at decoder.ffn.{role}: only updates of projections are exported"
        for role in ("experts.down", "experts.gate_up", "router")
    )
    adapter.detach()

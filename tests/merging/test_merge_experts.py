"""Adapters of experts and of routers merged into the weights of mixtures of experts."""

from __future__ import annotations

import itertools

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import MergeError
from tests.kit.own_models import (
    IMPLEMENTATIONS,
    TYPES,
    expert_logits,
    expert_model,
    holders,
    redraw,
)
from tests.kit.selection import long_table

SPECS = (
    "lora(sites=[ffn.experts.*], rank=3)",
    "lora(sites=[ffn.experts.*], rank=3, experts=shared)",
    "ia3(sites=[ffn.experts.*])",
    "lora(sites=[ffn.router], rank=2)",
    "ia3(sites=[ffn.router])",
)


# A third runs by default: each type, each specification, and in three commits each pair.
@long_table(("model_type", "spec"), itertools.product(TYPES, SPECS), parts=6, nightly=2)
def test_a_merged_model_computes_the_same_and_unmerge_restores_every_bit(model_type, spec):
    model = expert_model(model_type)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    adapter = ah.attach(model, spec)
    redraw(adapter)
    changed = {placed.site.host for placed in adapter.placed}
    with torch.no_grad():
        expected = expert_logits(model)
        # Values this far from zero round differently on each kind of processor.
        ah.merge(model, tolerance=1e-3)
        assert list(model.state_dict()) == list(before)
        torch.testing.assert_close(expert_logits(model), expected, atol=1e-4, rtol=1e-3)
        after = model.state_dict()
        moved = {name for name in before if not torch.equal(after[name], before[name])}
        assert moved
        assert {name.rpartition(".")[0] for name in moved} == changed
        ah.unmerge(model)
        assert torch.equal(expert_logits(model), expected)
    ah.detach(model)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("experts", IMPLEMENTATIONS)
def test_a_merged_checkpoint_is_a_plain_one(tmp_path, experts):
    """transformers loads it with any implementation, and computes the same."""
    model = expert_model("gpt_oss", experts)
    redraw(ah.attach(model, "lora(sites=[ffn.experts.*, attn.q, ffn.router])"))
    with torch.no_grad():
        expected = expert_logits(model)
        ah.merge(model)
        model.save_pretrained(tmp_path / "merged")
        plain = type(model).from_pretrained(tmp_path / "merged", experts_implementation=experts)
        torch.testing.assert_close(expert_logits(plain.eval()), expected, atol=2e-5, rtol=1e-4)
    ah.unmerge(model)
    ah.detach(model)


def test_an_adapter_of_experts_beside_others():
    model = expert_model("mixtral")
    redraw(ah.attach(model, SPECS[0], name="a"))
    redraw(ah.attach(model, "lora(sites=[attn.q, ffn.experts.down, ffn.router])", name="b"), seed=1)
    with torch.no_grad():
        ah.activate(model, "a", "b")
        expected = expert_logits(model)
        ah.merge(model, "a", "b")
        torch.testing.assert_close(expert_logits(model), expected, atol=2e-5, rtol=1e-4)
        ah.unmerge(model)
    with pytest.raises(MergeError, match="cannot be combined") as error:
        ah.combine(model, ["a", "b"])
    assert "decoder.ffn.experts.gate_up" in error.value.offenders
    ah.detach(model)


def test_experts_in_a_dtype_that_cannot_be_merged_are_refused():
    model = expert_model("mixtral")
    host = next(holders(model))
    ah.attach(model, SPECS[0])
    original = host._parameters["down_proj"]
    codes = torch.zeros(original.shape, dtype=torch.uint8)
    host._parameters["down_proj"] = torch.nn.Parameter(codes, requires_grad=False)
    try:
        with pytest.raises(MergeError, match="cannot merge into the weights") as error:
            ah.merge(model)
        assert any("down_proj: it is stored as uint8" in each for each in error.value.offenders)
    finally:
        host._parameters["down_proj"] = original
        ah.detach(model)

"""Variants of a module: one task head per row of a batch."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import adapterhub as ah
from adapterhub.anatomy.backbone import whole_states
from adapterhub.hooks.composition import AppliedModules, Average, BatchPlan
from adapterhub.hooks.head import (
    add_variant_slot,
    drop_variant_slots,
    with_parameters,
    without_variant_slots,
)
from tests.kit import tiny_models


class Model(nn.Module):
    """A model that is nothing but its head."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x)


@pytest.fixture
def model():
    return Model()


def set_variants(model, variants, plan):
    slot = add_variant_slot(model, "head", "user")
    slot.active = AppliedModules(tuple(variants), plan, variants)
    return slot


def test_each_row_is_computed_by_its_own_head(model):
    variants, x = {"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)}, torch.randn(4, 4)
    bare = model(x)
    set_variants(model, variants, BatchPlan(["b", (), "a", "b"]))
    output = model(x)
    expected = [variants["b"](x)[0], bare[1], variants["a"](x)[2], variants["b"](x)[3]]
    torch.testing.assert_close(output, torch.stack(expected))


def test_rows_with_fewer_classes_are_filled_with_minus_infinity(model):
    variants, x = {"five": nn.Linear(4, 5), "two": nn.Linear(4, 2)}, torch.randn(2, 4)
    set_variants(model, variants, BatchPlan(["five", "two"]))
    output = model(x)
    assert output.shape == (2, 5)
    torch.testing.assert_close(output[1, :2], variants["two"](x)[1])
    assert output[1, 2:].tolist() == [-float("inf")] * 3


def test_an_average_of_heads_is_the_mean_of_their_outputs(model):
    variants, x = {"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)}, torch.randn(2, 4)
    set_variants(model, variants, BatchPlan([Average(["a", "b"], [0.25, 0.75])]))
    torch.testing.assert_close(model(x), 0.25 * variants["a"](x) + 0.75 * variants["b"](x))


def test_the_last_user_restores_the_model(model):
    x, keys = torch.randn(2, 4), list(model.state_dict())
    expected = model(x)
    slot = set_variants(model, {"a": nn.Linear(4, 3)}, BatchPlan(["a"]))
    assert not torch.equal(model(x), expected)
    assert add_variant_slot(model, "head", "other") is slot
    assert add_variant_slot(model, "head", "other") is slot, "once for each user"
    drop_variant_slots(model, ["head"], "other")
    assert not torch.equal(model(x), expected)
    drop_variant_slots(model, ["head"], "user")
    drop_variant_slots(model, ["head"], "user")  # it is gone already
    assert torch.equal(model(x), expected)
    assert list(model.state_dict()) == keys
    assert not model.head._forward_hooks


def test_a_copy_of_a_head_loses_the_slot(model):
    x = torch.randn(2, 4)
    expected = model.head(x)
    set_variants(model, {"a": nn.Linear(4, 3)}, BatchPlan(["a"]))
    copied = without_variant_slots(copy.deepcopy(model.head))
    assert torch.equal(copied(x), expected)
    assert not copied._forward_hooks
    assert not torch.equal(model.head(x), expected)


def test_a_module_with_other_parameters_leaves_the_original_unchanged(model):
    weight = nn.Parameter(torch.zeros(3, 4))
    other = with_parameters(model.head, {"weight": weight})
    x = torch.randn(2, 4)
    torch.testing.assert_close(other(x), model.head.bias.expand(2, -1))
    assert other.bias is model.head.bias
    assert model.head.weight is not weight


def test_other_parameters_in_fp32_compute_in_the_dtype_of_the_module():
    host = nn.Linear(4, 3).bfloat16()
    weight = nn.Parameter(host.weight.detach().float() + 1)
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    output = with_parameters(host, {"weight": weight})(x)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, nn.functional.linear(x, weight.bfloat16(), host.bias))
    assert weight.dtype == torch.float32


class Expansions(TorchDispatchMode):
    """Notes the shapes that weights are expanded to: a copy for each row of a batch."""

    def __init__(self, weight):
        super().__init__()
        self.sizes, self.found = (weight.numel(), tuple(weight.T.shape)), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and tuple(result.shape[1:]) == self.sizes[1]:
            self.found.append((str(function), tuple(result.shape)))
        return result


@pytest.mark.parametrize("architecture", sorted(tiny_models.DECODERS))
def test_a_frozen_head_is_not_copied_for_each_row(architecture):
    """In front of a view of the last position, as of `generate` and its `logits_to_keep`."""
    model = tiny_models.model(architecture, "causal-lm")
    batch = tiny_models.batch()
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        pytest.skip("computes all logits")
    with torch.no_grad():
        before = model(**batch, logits_to_keep=1).logits
    ah.attach(model, "lora")
    with Expansions(model.get_output_embeddings().weight) as seen, torch.no_grad():
        after = model(**batch, logits_to_keep=1).logits
    assert seen.found == []
    assert after.shape == before.shape
    assert torch.allclose(after, before, atol=1e-6)


def test_what_the_test_looks_for_is_what_torch_does():
    """Without the hook: else the test above could not fail."""
    head = nn.Linear(4, 9, bias=False).requires_grad_(False)
    states = torch.randn(3, 5, 4)
    with Expansions(head.weight) as seen, torch.no_grad():
        head(states[:, -1:, :])
    assert seen.found
    with Expansions(head.weight) as seen, torch.no_grad():
        head(*whole_states(head, (states[:, -1:, :],)))
    assert seen.found == []

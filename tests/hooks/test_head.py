"""Heads: one for each row of a batch, and of linear layers in place of those of a class."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import ACT2FN

import adapterhub as ah
from adapterhub.anatomy.backbone import whole_states
from adapterhub.hooks.composition import AppliedModules, BatchPlan
from adapterhub.hooks.head import (
    NO_ACTIVATION,
    BothSigns,
    LayeredHead,
    activation_between,
    add_variant_slot,
    layered_head,
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


def test_a_copy_of_a_head_loses_the_slot(model):
    x = torch.randn(2, 4)
    expected = model.head(x)
    set_variants(model, {"a": nn.Linear(4, 3)}, BatchPlan(["a"]))
    copied = without_variant_slots(copy.deepcopy(model.head))
    assert torch.equal(copied(x), expected)
    assert not copied._forward_hooks
    assert not torch.equal(model.head(x), expected)


def test_other_parameters_in_fp32_compute_in_the_dtype_of_the_module():
    host = nn.Linear(4, 3).bfloat16()
    weight = nn.Parameter(host.weight.detach().float() + 1)
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    output = with_parameters(host, {"weight": weight})(x)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, nn.functional.linear(x, weight.bfloat16(), host.bias))
    assert weight.dtype == torch.float32
    assert host.weight is not weight


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


SHAPES = {"classifier.dense.weight": (5, 4), "classifier.dense.bias": (5,),
          "classifier.out.weight": (3, 5)}  # fmt: skip


@pytest.mark.parametrize("activation", ["tanh", "relu", "gelu_new"])
def test_a_head_of_two_layers(activation):
    own = layered_head({"classifier": nn.Linear(4, 2)}, SHAPES, activation)
    head, states = own["classifier"].eval(), torch.randn(2, 7, 4)
    expected = head.out(ACT2FN[activation](head.dense(states)))
    torch.testing.assert_close(head(states), expected)
    assert head(states).shape == (2, 7, 3)
    assert head.out.bias is None
    assert activation_between(own) == activation
    assert activation_between({"classifier": nn.Linear(4, 2)}) is None


def test_a_relu_of_the_model_in_between_changes_nothing():
    original = {"pre_classifier": nn.Linear(4, 4), "classifier": nn.Linear(4, 2)}
    own = layered_head(original, SHAPES, "tanh")
    states = torch.randn(6, 4)
    plain = layered_head({"classifier": nn.Linear(4, 2)}, SHAPES, "tanh")["classifier"].eval()
    plain.load_state_dict(own["classifier"].state_dict())
    assert isinstance(own["pre_classifier"], BothSigns)
    found = own["classifier"].eval()(own["pre_classifier"](states).relu())
    torch.testing.assert_close(found, plain(states))


def test_a_head_that_reads_the_first_token_and_drops_as_that_of_the_class():
    module = nn.Sequential(nn.Dropout(0.25), nn.Linear(4, 2))
    head = layered_head({"classifier": module}, SHAPES, "tanh")["classifier"].eval()
    assert isinstance(head, LayeredHead)
    assert head.dropout.p == 0.25
    states = torch.randn(2, 7, 4)
    torch.testing.assert_close(head(states), head(states[:, 0]))


@pytest.mark.parametrize(
    ("shapes", "activation", "error"),
    [(SHAPES, "no such", KeyError), ({}, "tanh", KeyError), ({}, NO_ACTIVATION, KeyError),
     ({**SHAPES, "classifier.out.weight": (3,)}, "tanh", ValueError)],
)  # fmt: skip
def test_shapes_of_a_broken_file_are_refused(shapes, activation, error):
    with pytest.raises(error):
        layered_head({"classifier": nn.Linear(4, 2)}, shapes, activation)

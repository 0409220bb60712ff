"""Heads of one or two linear layers in place of those of a class; test_head.py of interchange has
all architectures."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from adapterhub.hooks.head import (
    NO_ACTIVATION,
    BothSigns,
    LayeredHead,
    activation_between,
    layered_head,
)

SHAPES = {"classifier.dense.weight": (5, 4), "classifier.dense.bias": (5,),
          "classifier.out.weight": (3, 5)}  # fmt: skip


@pytest.mark.parametrize("activation", ["tanh", "relu", "gelu_new"])
def test_two_layers(activation):
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
def test_what_a_broken_file_may_say(shapes, activation, error):
    with pytest.raises(error):
        layered_head({"classifier": nn.Linear(4, 2)}, shapes, activation)

"""Trying layers with code of their own: what they compute with, and whether gradients pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from adapterhub.backbones.quantized import blocks_gradients, computes_with, has_own_code


class Own(nn.Linear):
    """A linear layer with a factor, a rounding of its inputs, and a cut."""

    def __init__(self, factor: float = 1.0, levels: float = 0.0, cut: bool = False) -> None:
        super().__init__(16, 24)
        self.factor, self.levels, self.cut = factor, levels, cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.levels:
            x = (x * self.levels).round() / self.levels
        return F.linear(x.detach() if self.cut else x, self.factor * self.weight, self.bias)


class Many(nn.Linear):
    """A layer that returns a tuple."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def test_only_other_code_is_tried():
    plain = nn.Linear(4, 4)
    assert not has_own_code(plain)
    assert not has_own_code(Conv1D(4, 4))
    assert has_own_code(Own())
    plain.forward = lambda x: x
    assert has_own_code(plain)
    plain._hf_hook = object()  # accelerate replaces `forward` to load weights
    assert not has_own_code(plain)


@pytest.mark.parametrize(("layer", "expected"), [
    (Own(), True),
    (Own(levels=16.0), True),  # 8 bits of activations
    (Own(levels=1.0), False),
    (Own(factor=1.2), False),
    (Own(factor=float("nan")), False),
    (Many(16, 24), False),
])  # fmt: skip
def test_a_layer_computes_with_its_weight_up_to_rounding(layer, expected):
    assert computes_with(layer, layer.weight, torch.float32) is expected


def test_a_weight_of_another_shape_is_not_that_of_the_layer():
    layer = Own()
    assert not computes_with(layer, torch.randn(24, 8), torch.float32)


def test_hooks_are_not_called_and_random_numbers_are_not_drawn():
    layer = Own()
    layer.register_forward_hook(lambda *_: pytest.fail("a hook was called"))
    before = torch.get_rng_state()
    assert computes_with(layer, layer.weight, torch.float32)
    assert not blocks_gradients(layer, 16, layer.weight)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("layer", "expected"), [
    (Own(), False), (Own(cut=True), True), (Many(16, 24), False),
    (Own(levels=4.0), True),  # the gradient of a rounding is zero
])  # fmt: skip
def test_a_layer_that_cuts_gradients_is_found(layer, expected):
    layer.requires_grad_(False)
    with torch.no_grad():
        assert blocks_gradients(layer, 16, layer.weight) is expected


class NoBackward(torch.autograd.Function):
    """A product whose kernel has no backward pass."""

    @staticmethod
    def forward(ctx, x, weight):
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError


def test_a_kernel_without_a_backward_pass_is_found():
    layer = nn.Linear(16, 24)
    layer.forward = lambda x: NoBackward.apply(x, layer.weight)
    assert computes_with(layer, layer.weight, torch.float32) is False  # the bias is missing
    assert blocks_gradients(layer, 16, layer.weight)


def test_a_layer_without_a_kernel_here_is_left_to_the_model():
    layer = nn.Linear(16, 24)
    layer.forward = lambda x: torch.ops.not_there.kernel(x)
    assert not blocks_gradients(layer, 16, layer.weight)
    assert not computes_with(layer, layer.weight, torch.float32)

"""Hooks and settings of bitsandbytes layers. Layers that behave like them stand in for them."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from adapterhub.backbones.quantized import (
    drop_saved_input,
    keep_4bit_layout,
    prepare_quantized,
)
from adapterhub.patch import Patch


class FourBit(nn.Linear):
    """A layer that may repack its weight, unless told otherwise."""

    def __init__(self, packed):
        super().__init__(4, 4)
        self.weight.quant_state = SimpleNamespace(packing_format_for_cpu=packed)
        self.support_avx512bf16_for_cpu = True
        self.unpacked = False

    def state_dict(self, *args, **options):
        self.unpacked = True
        return super().state_dict(*args, **options)


class EightBit(nn.Linear):
    """A layer with one scale per row."""

    def __init__(self):
        super().__init__(4, 4)
        self.weight.SCB = torch.ones(4)


def test_only_layers_that_can_repack_are_changed():
    model = nn.Sequential(FourBit(packed=True), nn.Linear(4, 4), FourBit(packed=False))
    keep_4bit_layout(model, patch := Patch())
    assert len(patch.undoing) == 2
    assert [model[0].unpacked, model[2].unpacked] == [True, False]
    assert not model[0].support_avx512bf16_for_cpu
    keep_4bit_layout(model, patch)
    assert len(patch.undoing) == 2, "a second call changes nothing"


def test_restoring_undoes_preparing():
    model = nn.Sequential(FourBit(packed=False), EightBit(), nn.Linear(4, 4))
    patch = Patch()
    for _ in range(2):
        prepare_quantized(model, patch)
        assert not model[0].support_avx512bf16_for_cpu
        assert len(model[1]._forward_hooks) == 1
        made = len(patch.undoing)
        prepare_quantized(model, patch)
        assert len(patch.undoing) == made, "a second call changes nothing"
        patch.undo()
        assert model[0].support_avx512bf16_for_cpu
        assert not model[1]._forward_hooks


class SavesInput(torch.autograd.Function):
    """Keeps its input in attributes of the node, as bitsandbytes does."""

    @staticmethod
    def forward(ctx, x):
        ctx.tensors, ctx.A = (x, x), x
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        assert ctx.tensors == (None, None)
        assert ctx.A is None
        return 2 * gradient


def test_the_saved_input_is_freed_and_gradients_still_flow():
    x = torch.ones(3, requires_grad=True)
    y = SavesInput.apply(x)
    drop_saved_input(nn.Identity(), (x,), y)
    y.sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    drop_saved_input(nn.Identity(), (x,), torch.ones(3))  # no gradient: nothing to do

"""Trained parameters in fp32 on a backbone of lower precision."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from adapterhub.hooks.precision import hold_in_fp32, raise_input, release_from_fp32


def master(module, name):
    """Replace a parameter by a trained fp32 copy."""
    dtype = module.get_parameter(name).dtype
    parameter = nn.Parameter(module.get_parameter(name).detach().float())
    module._parameters[name] = parameter
    hold_in_fp32(module, name, dtype)
    return parameter


@pytest.fixture
def linear():
    return nn.Linear(4, 3).bfloat16()


def test_a_module_computes_in_its_dtype_with_an_fp32_parameter(linear):
    """Also behind an error, and in a copy, which has a parameter of its own."""
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    expected = linear(x)
    weight = master(linear, "weight")
    output = linear(x)
    assert output.dtype == linear(x.float()).dtype == torch.bfloat16
    assert torch.equal(output, expected)
    output.sum().backward()
    assert weight.dtype == weight.grad.dtype == torch.float32
    assert weight.grad.any()
    with pytest.raises(RuntimeError):
        linear(torch.randn(2, 5, dtype=torch.bfloat16))
    assert linear.weight is weight
    copied = copy.deepcopy(linear)
    with torch.no_grad():
        linear.weight.zero_()
    assert torch.equal(copied(x), expected)


def test_releasing_the_last_parameter_restores_the_module(linear):
    attributes, hooks = set(vars(linear)), len(linear._forward_hooks)
    for name in ("weight", "bias"):
        master(linear, name)
    release_from_fp32(linear, "weight")
    assert len(linear._forward_hooks) > hooks, "the bias is still held"
    release_from_fp32(linear, "bias")
    assert set(vars(linear)) == attributes
    assert len(linear._forward_hooks) == hooks
    release_from_fp32(linear, "bias")  # has no effect


def test_a_head_reads_floating_point_inputs_in_fp32():
    head = nn.Linear(4, 3)
    head.register_forward_pre_hook(raise_input, with_kwargs=True)
    assert head(torch.randn(2, 4, dtype=torch.bfloat16)).dtype == torch.float32
    ids = torch.tensor([1, 2])
    assert raise_input(head, (ids,), {})[0][0].dtype == ids.dtype

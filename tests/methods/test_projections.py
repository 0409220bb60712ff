"""The methods that change a projection compute their equations, by hand in tiny_adapters.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.kit import tiny_models
from tests.kit.selection import long_table
from tests.kit.tiny_adapters import EQUATIONS, PROJECTIONS, attach_at, road

CELLS = [(method, architecture) for method in EQUATIONS for architecture in PROJECTIONS]


@long_table(("method", "architecture"), CELLS, parts=3)
def test_the_weight_is_that_of_the_equation(method, architecture):
    equation, options = EQUATIONS[method]
    one = attach_at(architecture, PROJECTIONS[architecture], method, **options)
    fixed = {n: b.clone() for n, b in one.module.named_buffers()}
    tiny_models.scramble(one.adapter)
    with torch.no_grad():
        for name, buffer in one.module.named_buffers():
            buffer.copy_(fixed[name])
        one.adapter.model.eval()
        x = torch.randn(2, 5, one.site.d_in)
        weight: Tensor = equation(one.weight, one.module, **options)
        bias = one.bias
        if method == "road" and bias is not None:
            bias = road(bias[:, None], one.module)[:, 0]
        if method == "ssf" and bias is not None:
            bias = one.module.scale * bias + one.module.shift
        if method == "beft":
            bias = one.module.b if bias is None else bias + one.module.b
        if method == "adamss" and bias is not None:
            bias = equation(bias, one.module, **options)
        if method == "glora" and bias is not None:
            c = one.module.C.left @ one.module.C.right
            bias = bias * (1 + one.module.D.value) + one.module.E.value + (one.weight @ c)[:, 0]
        expected = torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(one.output(x), expected, atol=2e-4, rtol=2e-4)


def test_osf_trains_in_directions_that_are_orthogonal_to_the_kept_ones():
    one = attach_at("bert", PROJECTIONS["bert"], "osf", kept=0.75)
    module = one.module
    tiny_models.scramble(one.adapter)
    one.output(torch.randn(2, 3, one.site.d_in)).square().sum().backward()
    assert module.U.grad.abs().max() > 0.1
    assert (module.left_kept.T @ module.U.grad).abs().max() < 1e-4
    assert (module.V.grad @ module.right_kept.T).abs().max() < 1e-4


def test_the_series_of_cayley_is_near_the_exact_rotation():
    outputs = []
    for terms in (0, 12, 5):
        one = attach_at("bert", PROJECTIONS["bert"], "oft", block=8, terms=terms)
        tiny_models.scramble(one.adapter, std=0.05)
        outputs.append(one.output(torch.ones(1, 3, one.site.d_in)))
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-6, rtol=1e-6)
    difference = (outputs[2] - outputs[0]).abs().max()
    assert 0 < difference < 0.02


def test_a_kept_matrix_is_that_of_the_parameters():
    """A computed D is kept in `eval()`, and is computed again once a byte of it changes."""
    one = attach_at("bert", PROJECTIONS["bert"], "loha", rank=2)
    module = one.module.eval().requires_grad_(False)
    tiny_models.scramble(one.adapter)
    x, y = torch.randn(3, one.site.d_in), torch.randn(3, one.site.d_out)
    calls = []
    original = type(module).delta
    type(module).delta = lambda self: calls.append(1) or original(self)
    try:
        first = module(x, y)
        assert torch.equal(module(x, y), first)
        assert len(calls) == 1
        module.A2.data[0, 0] += 1  # no version counter shows this
        assert not torch.equal(module(x, y), first)
        assert len(calls) == 2
        module.requires_grad_(True)
        module(x, y).sum().backward()
        assert module.A1.grad is not None
        assert len(calls) == 3
    finally:
        type(module).delta = original


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_keys_and_values_are_scaled_at_the_output(architecture):
    """y' = l * (W x + b)."""
    one = attach_at(architecture, PROJECTIONS[architecture], "ia3")
    tiny_models.scramble(one.adapter)
    x = torch.randn(4, one.site.d_in)
    expected = F.linear(x, one.weight, one.bias) * one.module.scale
    torch.testing.assert_close(one.output(x), expected, atol=1e-5, rtol=1e-5)

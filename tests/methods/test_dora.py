"""DoRA: its equation and gradients, its size, and that it keeps no copy of the weight."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import adapterhub as ah
from adapterhub.errors import SiteError
from tests.kit import tiny_models
from tests.kit.tiny_adapters import PROJECTIONS, attach_at


@pytest.mark.parametrize("architecture", PROJECTIONS)
def test_the_output_is_equation_5_with_a_constant_norm(architecture):
    """y = m / ||V|| V x + b with V = W + s B A; gradients do not flow through ||V||."""
    one = attach_at(architecture, PROJECTIONS[architecture], "dora", rank=3, alpha=6)
    tiny_models.scramble(one.adapter)
    module, x = one.module, torch.randn(4, one.site.d_in)
    target = torch.randn(4, one.site.d_out)
    (one.output(x) * target).sum().backward()
    trained = (module.magnitude, module.A, module.B)
    m, a, b = (p.detach().clone().requires_grad_() for p in trained)
    v = one.weight + 2.0 * b @ a
    y = F.linear(x, (m / v.detach().norm(dim=1))[:, None] * v, one.bias)
    (y * target).sum().backward()
    torch.testing.assert_close(one.output(x), y, atol=1e-4, rtol=1e-4)
    for parameter, expected in zip(trained, (m, a, b), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, atol=1e-4, rtol=1e-4)


def test_no_copy_of_the_weight_is_kept():
    one = attach_at("bert", "encoder.1.attn.q", "dora", rank=3)
    assert sum(t.numel() for t in one.module.state_dict().values()) < one.weight.numel()
    copied = copy.deepcopy(one.adapter.model).get_submodule(one.site.host)
    with torch.no_grad():
        copied.weight.add_(torch.randn(copied.weight.shape))
    x = torch.randn(2, one.site.d_in)
    assert not torch.allclose(copied(x), one.output(x), atol=1e-3)


def test_the_count_is_that_of_lora_and_the_magnitudes():
    adapter = ah.attach(tiny_models.model("bert"), "dora(rank=3, sites=['ffn.up'])")
    assert adapter.count() == 2 * (3 * (32 + 48) + 48)
    assert adapter.count() == adapter.methods[0].count(adapter.anatomy)


@pytest.mark.parametrize("method", ["dora", "pissa"])
def test_a_sublayer_has_no_weight_to_read(method):
    with pytest.raises(SiteError, match="does not support these sites") as error:
        ah.attach(tiny_models.model("bert"), {method: {"sites": ["ffn", "attn.q"]}})
    assert error.value.offenders == ("ffn",)

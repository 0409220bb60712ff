"""IA3: its equation at the output and the input of a projection, and its size."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import adapterhub as ah
from adapterhub.errors import SiteError
from tests.kit import tiny_models
from tests.kit.tiny_adapters import PROJECTIONS, attach_at


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_keys_and_values_are_scaled_at_the_output(architecture):
    """y' = l * (W x + b)."""
    one = attach_at(architecture, PROJECTIONS[architecture], "ia3")
    tiny_models.scramble(one.adapter)
    x = torch.randn(4, one.site.d_in)
    expected = F.linear(x, one.weight, one.bias) * one.module.scale
    torch.testing.assert_close(one.output(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_the_feed_forward_middle_is_scaled_at_the_input(architecture):
    """y' = W (l * x) + b at ffn.down."""
    site = "encoder.0.ffn.down" if architecture == "bert" else "decoder.0.ffn.down"
    one = attach_at(architecture, site, "ia3")
    tiny_models.scramble(one.adapter)
    x = torch.randn(4, one.site.d_in)
    expected = F.linear(x * one.module.scale, one.weight, one.bias)
    torch.testing.assert_close(one.output(x), expected, atol=1e-5, rtol=1e-5)


def test_the_count_is_the_sum_of_the_widths():
    adapter = ah.attach(tiny_models.model("bert"), "ia3")
    assert adapter.count() == 2 * (32 + 32 + 48)
    assert adapter.count() == adapter.methods[0].count(adapter.anatomy)
    at_outputs = ah.attach(tiny_models.model("bert"), "ia3(inputs=[])")
    assert at_outputs.count() == 2 * (32 + 32 + 32)


def test_a_sublayer_is_refused():
    with pytest.raises(SiteError) as error:
        ah.attach(tiny_models.model("bert"), "ia3(sites=['ffn'])")
    assert error.value.offenders == ("ffn",)

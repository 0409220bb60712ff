"""rsLoRA: LoRA with the scale alpha / sqrt(rank)."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import adapterhub as ah
from adapterhub.errors import ConfigError
from tests.kit import tiny_models
from tests.kit.tiny_adapters import PROJECTIONS, attach_at


@pytest.mark.parametrize("architecture", PROJECTIONS)
def test_the_update_is_scaled_by_the_square_root_of_the_rank(architecture):
    """Theorem 3.2: y = W x + b + alpha / sqrt(rank) B A x."""
    one = attach_at(architecture, PROJECTIONS[architecture], "rslora", rank=4, alpha=6)
    tiny_models.scramble(one.adapter)
    x = torch.randn(4, one.site.d_in)
    expected = F.linear(x, one.weight + 3.0 * one.module.B @ one.module.A, one.bias)
    torch.testing.assert_close(one.output(x), expected, atol=1e-5, rtol=1e-5)


def test_each_site_is_scaled_by_its_own_rank():
    adapter = ah.attach(tiny_models.model("bert"), "rslora(rank=4, alpha=8, ranks={'attn.v': 16})")
    scales = {p.site.role: p.module.scale for p in adapter.placed}
    assert scales == {"attn.q": 4.0, "attn.v": 2.0}


def test_the_count_is_that_of_lora():
    adapter = ah.attach(tiny_models.model("bert"), "rslora(rank=5)")
    assert adapter.count() == 2 * 2 * 5 * (32 + 32)
    assert adapter.count() == ah.attach(tiny_models.model("bert"), "lora(rank=5)").count()


def test_a_rank_of_zero_is_refused():
    with pytest.raises(ConfigError) as error:
        ah.attach(tiny_models.model("bert"), "rslora(rank=0)")
    assert "rank" in str(error.value)

"""LoRA: its equation, its size, and what its variants share."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import adapterhub as ah
from adapterhub.errors import ConfigError
from adapterhub.methods import METHODS
from adapterhub.methods.common.base import dump_methods, parse_methods
from adapterhub.methods.lora import LoRA
from tests.kit import tiny_models
from tests.kit.tiny_adapters import PROJECTIONS, attach_at

VARIANTS = sorted(name for name, method in METHODS.items() if issubclass(method, LoRA))


@pytest.mark.parametrize("architecture", PROJECTIONS)
def test_the_output_is_equation_3(architecture):
    """y = W x + b + alpha / rank B A x."""
    one = attach_at(architecture, PROJECTIONS[architecture], "lora", rank=3, alpha=6)
    tiny_models.scramble(one.adapter)
    x = torch.randn(4, one.site.d_in)
    expected = F.linear(x, one.weight + 2.0 * one.module.B @ one.module.A, one.bias)
    torch.testing.assert_close(one.output(x), expected, atol=1e-5, rtol=1e-5)


def test_the_count_is_rank_times_the_widths():
    adapter = ah.attach(tiny_models.model("bert"), "lora(rank=3, sites=['attn.q', 'ffn.up'])")
    assert adapter.count() == 2 * (3 * (32 + 32) + 3 * (32 + 48))
    assert adapter.count() == adapter.methods[0].count(adapter.anatomy)


def test_dropout_is_active_in_training_only():
    one = attach_at("bert", "encoder.1.attn.q", "lora", dropout=0.5)
    tiny_models.scramble(one.adapter)
    x = torch.randn(4, one.site.d_in)
    assert torch.equal(one.output(x), one.output(x))
    one.module.train()
    assert not torch.equal(one.output(x), one.output(x))


@pytest.mark.parametrize("dropout", [-0.1, 1.5])
def test_a_dropout_that_is_no_probability_is_refused(dropout):
    with pytest.raises(ConfigError) as error:
        LoRA(dropout=dropout)
    assert "dropout" in str(error.value)


def test_the_text_form_and_the_normal_form_agree():
    (method,) = parse_methods("lora(rank=2, ranks={'attn.q': 4})")
    assert method.ranks == {"attn.q": 4}
    assert parse_methods(dump_methods([method])) == (method,)
    assert parse_methods("lora")[0].ranks == {}
    assert parse_methods("lora")[0].ranks is not parse_methods("lora")[0].ranks


def test_ranks_are_saved(tmp_path):
    spec = {"lora": {"ranks": {"*": 2, "attn.q": 4, "encoder.0.attn.v": 3}}}
    adapter = ah.attach(tiny_models.model("bert"), spec)
    adapter.save(tmp_path / "adapter")
    loaded = ah.load(tiny_models.model("bert"), tmp_path / "adapter")
    assert loaded.methods == adapter.methods
    assert {n: t.shape for n, t in loaded.tensors().items()} == {
        n: t.shape for n, t in adapter.tensors().items()
    }


def test_every_variant_is_covered():
    assert {"lora", "rslora", "lora-plus", "dora", "pissa"} <= set(VARIANTS)


@pytest.mark.parametrize("method", VARIANTS)
def test_variants_stay_in_fp32_on_a_bfloat16_backbone(method):
    model = tiny_models.model("llama").bfloat16()
    adapter = ah.attach(model, method)
    model(**tiny_models.batch()).logits.float().sum().backward()
    for placed in adapter.placed:
        assert {p.dtype for p in placed.module.parameters()} == {torch.float32}
        assert all(p.grad.isfinite().all() for p in placed.module.parameters())

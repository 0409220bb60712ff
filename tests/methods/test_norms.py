"""Norm tuning: which parameters train, and what they compute."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import SiteError
from tests.kit import tiny_models
from tests.kit.tiny_adapters import trained_names


def test_trained_scales_and_biases_replace_those_of_the_norm():
    """y = g * (x - mean) / sd + b with the trained g and b."""
    model = tiny_models.model("bert")
    norm = model.bert.encoder.layer[0].output.LayerNorm
    adapter = ah.attach(model, "norms(layers=0)")
    tiny_models.scramble(adapter, std=2.0)
    tensors = adapter.tensors()
    scale, bias = (tensors[f"encoder.0.ffn.norm.norms.{n}"] for n in ("weight", "bias"))
    x = torch.randn(4, 32)
    centred = x - x.mean(-1, keepdim=True)
    expected = scale * centred / (x.var(-1, correction=0, keepdim=True) + norm.eps).sqrt() + bias
    torch.testing.assert_close(norm(x), expected, atol=1e-5, rtol=1e-5)


def test_the_count_is_the_sum_of_the_widths():
    """BERT has a norm after the embeddings and two in each layer."""
    adapter = ah.attach(tiny_models.model("bert"), "norms")
    assert adapter.count() == (1 + 2 * 2) * (32 + 32)
    assert adapter.count() == adapter.methods[0].count(adapter.anatomy)


def test_outside_excludes_the_norms_outside_the_layers():
    names = trained_names("mbart", "norms(outside=False)")
    outside = trained_names("mbart", "norms") - names
    assert all(name.startswith(("encoder.", "decoder.")) for name in names)
    assert {name.rsplit(".", 3)[1] for name in outside} == {"layer_norm", "layernorm_embedding"}


def test_layers_select_the_norms_of_one_layer_and_the_final_one():
    assert trained_names("llama", "norms(layers=1)") == {
        "decoder.1.attn.norm.norms.weight",
        "decoder.1.ffn.norm.norms.weight",
        "backbone.norm.norms.weight",
    }


def test_norms_without_parameters_are_refused():
    with pytest.raises(SiteError) as error:
        ah.attach(tiny_models.model("olmo"), "norms")
    assert "norms" in error.value.problem
    assert "norms" not in error.value.hint

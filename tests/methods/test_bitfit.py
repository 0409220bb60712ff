"""BitFit: which biases train, and what they compute."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import SiteError
from tests.kit import tiny_models
from tests.kit.tiny_adapters import trained_names


def test_exactly_the_biases_of_the_backbone_train():
    model = tiny_models.model("bert")
    biases = {p for n, p in model.base_model.named_parameters() if n.endswith("bias")}
    adapter = ah.attach(model, "bitfit")
    assert len(adapter.changed) == len(biases) > 10
    assert adapter.count() == sum(p.numel() for p in biases)
    assert adapter.count() == adapter.methods[0].count(adapter.anatomy)


def test_a_trained_bias_replaces_that_of_the_projection():
    """y = W x + b with the trained b."""
    model = tiny_models.model("bert")
    host = model.bert.encoder.layer[0].attention.self.query
    weight, original = host.weight.detach().clone(), host.bias.detach().clone()
    adapter = ah.attach(model, "bitfit(sites=['attn.q'], layers=0)")
    tiny_models.scramble(adapter, std=2.0)
    (changed,) = adapter.changed
    x = torch.randn(4, 32)
    assert not torch.allclose(changed.own, original, atol=1e-2)
    torch.testing.assert_close(host(x), x @ weight.T + changed.own, atol=1e-5, rtol=1e-5)
    ah.activate(model)
    torch.testing.assert_close(host(x), x @ weight.T + original, atol=1e-5, rtol=1e-5)


def test_sites_select_the_papers_smaller_set():
    names = trained_names("bert", "bitfit(sites=['attn.q', 'ffn.up'])")
    roles = ("attn.q", "ffn.up")
    assert names == {f"encoder.{n}.{role}.bitfit.bias" for n in (0, 1) for role in roles}


def test_layers_select_one_layer():
    names = trained_names("bert", "bitfit(layers='top 1')")
    assert names
    assert all(name.startswith("encoder.1.") for name in names)
    assert names < trained_names("bert", "bitfit")


def test_a_part_of_a_shared_bias_is_refused():
    with pytest.raises(SiteError, match="share one") as error:
        trained_names("gpt2", "bitfit(sites=['attn.q', 'attn.o'])")
    assert error.value.offenders == ("attn.q",)
    assert trained_names("gpt2", error.value.hint)


def test_sites_without_a_bias_are_refused():
    with pytest.raises(SiteError, match="no bias at the sites"):
        trained_names("qwen2", "bitfit(sites=['ffn.up'])")

"""Prefixes in attention: implementations, masks, gates, and the backbone's own attention."""

from __future__ import annotations

import pytest
import tiny_models
import torch

import adapterhub as ah
from adapterhub.errors import SiteError
from adapterhub.hooks.attention import SUPPORTED


def logits(model, **options):
    with torch.no_grad():
        return model(**(options or tiny_models.batch())).logits


def with_prefix(implementation, spec="prefix(length=3)", architecture="llama"):
    model = tiny_models.model(architecture)
    model.set_attn_implementation(implementation)
    torch.manual_seed(0)
    tiny_models.scramble(ah.attach(model, spec), std=0.5)
    return model


@pytest.mark.parametrize("spec", ["prefix(length=3)", "unipelt(length=3, sites=['attn.kv'])"])
@pytest.mark.parametrize("architecture", ["bert", "llama", "t5", "bart"])
def test_every_supported_implementation_gives_equal_outputs(architecture, spec):
    first, *others = (logits(with_prefix(i, spec, architecture)) for i in SUPPORTED)
    assert len(others) == 1
    for other in others:
        torch.testing.assert_close(other, first, atol=1e-5, rtol=1e-4)


def test_a_prefix_is_visible_to_every_token_of_a_causal_model():
    """Without a mask from the caller, transformers relies on torch's causal flag."""
    model = with_prefix("sdpa")
    ids = tiny_models.batch()["input_ids"]
    expected = logits(model, input_ids=ids, attention_mask=torch.ones_like(ids))
    assert torch.equal(logits(model, input_ids=ids), expected)
    bare = with_prefix("sdpa")
    ah.activate(bare)
    hidden = [m.model(ids).last_hidden_state for m in (model, bare)]
    assert not torch.allclose(hidden[0][:, 0], hidden[1][:, 0], atol=1e-3)


def test_future_tokens_stay_hidden():
    model = with_prefix("sdpa")
    ids = tiny_models.batch(1, 8)["input_ids"]
    changed = ids.clone()
    changed[:, 5:] = 7
    first, second = (model.model(i).last_hidden_state for i in (ids, changed))
    torch.testing.assert_close(first[:, :5], second[:, :5])
    assert not torch.allclose(first[:, 5:], second[:, 5:], atol=1e-3)


def test_eager_attention_returns_weights_over_prefix_and_tokens():
    model = with_prefix("eager", architecture="bert")
    with torch.no_grad():
        output = model(**tiny_models.batch(), output_attentions=True)
    weights = output.attentions[0]
    assert weights.shape[-2:] == (9, 3 + 9)
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_detaching_restores_the_attention_implementation():
    model = tiny_models.model("llama")
    before = model.config._attn_implementation
    adapter = ah.attach(model, "prefix")
    assert model.config._attn_implementation != before
    adapter.detach()
    assert model.config._attn_implementation == before


def test_an_unsupported_implementation_is_refused():
    model = tiny_models.model("llama")
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(SiteError) as error:
        ah.attach(model, "prefix")
    assert "flex_attention" in str(error.value)
    assert "eager" in error.value.expected

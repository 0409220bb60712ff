"""Prefixes in attention: implementations, masks, gates, and the backbone's own attention."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from transformers import PreTrainedModel

import adapterhub as ah
from adapterhub.anatomy.projections import attends
from adapterhub.errors import SiteError
from adapterhub.hooks.attention import SUPPORTED
from tests.kit import tiny_models
from tests.kit.selection import long_table
from tests.kit.tiny_models import logits


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


def test_the_config_of_the_backbone_is_not_changed():
    model = tiny_models.model("llama")
    before, configs = model.config.to_dict(), [getattr(m, "config", None) for m in model.modules()]
    adapter = ah.attach(model, "prefix")
    assert model.config.to_dict() == before
    assert model.config._attn_implementation == "sdpa"
    adapter.detach()
    after = [getattr(m, "config", None) for m in model.modules()]
    assert all(a is b for a, b in zip(after, configs, strict=True))


def test_an_unsupported_implementation_is_refused():
    model = tiny_models.model("llama")
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(SiteError) as error:
        ah.attach(model, "prefix")
    assert "flex_attention" in str(error.value)
    assert "eager" in error.value.expected


def is_routed(architecture):
    model = tiny_models.usual_model(architecture)
    sites = ah.anatomy_of(model).sites.values()
    hosts = [model.get_submodule(site.host) for site in sites if site.kind == "keyvalue"]
    return bool(hosts) and all(attends(host) == "interface" for host in hosts)


ROUTED = list(filter(is_routed, tiny_models.MATRIX))
SWITCHES = [(a, *pair) for a in ROUTED for pair in itertools.permutations(SUPPORTED)]


def set_by_method(model, implementation):
    model.set_attn_implementation(implementation)


def set_in_config(model, implementation):
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation = implementation


def usual_logits(model):
    inputs = tiny_models.batch()
    return logits(model, **inputs, **tiny_models.decoder_inputs(model, inputs))


def usual_model(architecture, implementation, spec=None):
    model = tiny_models.usual_model(architecture)
    set_in_config(model, implementation)
    if spec:
        torch.manual_seed(0)
        tiny_models.scramble(ah.attach(model, spec), std=0.5)
    return model


def implementations(model):
    return {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}


def test_most_architectures_have_a_prefix():
    assert len(SWITCHES) >= 2 * (28 if tiny_models.FULL_MATRIX else 9)


@long_table(
    ("architecture", "before", "after", "switch"),
    [(*each, switch) for each in SWITCHES for switch in (set_by_method, set_in_config)],
    3,
)
def test_a_prefix_follows_a_later_change_of_the_implementation(architecture, before, after, switch):
    spec = "prefix(length=3)"
    expected = usual_logits(usual_model(architecture, after, spec))
    bare = usual_logits(usual_model(architecture, after))
    assert not torch.allclose(bare, expected, atol=1e-3)
    model = usual_model(architecture, before, spec)
    assert not torch.allclose(usual_logits(model), bare, atol=1e-3)
    switch(model, after)
    assert implementations(model) >= {after}
    assert torch.equal(usual_logits(model), expected)
    ah.activate(model)
    assert torch.equal(usual_logits(model), bare)
    ah.detach(model)
    assert implementations(model) == {after}
    assert torch.equal(usual_logits(model), bare)
    switch(model, before)
    assert implementations(model) == {before}
    assert torch.equal(usual_logits(model), usual_logits(usual_model(architecture, before)))


@pytest.mark.parametrize("architecture", ROUTED)
def test_models_that_share_a_config_keep_their_own_prefixes(architecture):
    one = usual_model(architecture, "sdpa")
    other = type(one)(one.config).eval()
    other.load_state_dict(one.state_dict())
    assert other.config is one.config
    bare = usual_logits(other)
    for model, seed in ((one, 1), (other, 2)):
        tiny_models.scramble(ah.attach(model, "prefix(length=3)"), seed=seed, std=0.5)
    with_prefix = usual_logits(other)
    assert not torch.allclose(with_prefix, bare, atol=1e-3)
    assert not torch.allclose(with_prefix, usual_logits(one), atol=1e-3)
    ah.detach(one)
    assert torch.equal(usual_logits(one), bare)
    assert torch.equal(usual_logits(other), with_prefix)
    ah.detach(other)
    assert torch.equal(usual_logits(other), bare)


@pytest.mark.parametrize("architecture", ["bert", "t5"])
def test_a_copied_or_pickled_model_has_its_own_prefix_and_config(architecture):
    model = usual_model(architecture, "sdpa", "prefix(length=3)")
    expected = usual_logits(model)
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    ah.detach(model)
    for twin in twins:
        assert torch.equal(usual_logits(twin), expected)
        twin.set_attn_implementation("eager")
        assert implementations(model) == {"sdpa"}
        torch.testing.assert_close(usual_logits(twin), expected, atol=1e-5, rtol=1e-4)
        ah.detach(twin)
        assert implementations(twin) == {"eager"}


def test_an_unsupported_implementation_is_refused_at_the_next_forward():
    model = with_prefix("sdpa")
    expected = logits(model)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(SiteError, match="flash_attention_2"):
        logits(model)
    ah.activate(model)
    assert model.model.layers[0].self_attn.config._attn_implementation == "flash_attention_2"
    ah.activate(model, "default")
    model.set_attn_implementation("sdpa")
    assert torch.equal(logits(model), expected)


def test_an_attention_module_reads_and_writes_the_config_of_its_model():
    model = with_prefix("sdpa")
    view = model.model.layers[0].self_attn.config
    assert view.hidden_size == model.config.hidden_size
    view.note = "written"
    assert model.config.note == "written"
    with pytest.raises(AttributeError, match="no_such_field"):
        view.no_such_field  # noqa: B018

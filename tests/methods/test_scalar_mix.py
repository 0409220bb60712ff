"""Scalar mix by its equation, on the hidden states that transformers itself reports."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch

import adapterhub as ah


def states(model):
    """The bare backbone's: embeddings, then each layer; what is above them comes after."""
    with torch.no_grad():
        return model(**tiny_models.batch(), output_hidden_states=True).hidden_states


def expected_mix(adapter, hidden):
    mix = adapter.placed[0].module
    shares = mix.w.detach().softmax(0)
    return mix.gamma.detach() * sum(s * h for s, h in zip(shares, hidden, strict=True))


@pytest.mark.parametrize("architecture", ["bert", "distilbert"])
def test_it_is_equation_1(architecture):
    model = tiny_models.model(architecture, "features")
    hidden = states(model)
    assert len(hidden) == 3
    adapter = ah.attach(model, "scalar-mix")
    tiny_models.scramble(adapter, std=1.0)
    with torch.no_grad():
        found = model(**tiny_models.batch()).last_hidden_state
    torch.testing.assert_close(found, expected_mix(adapter, hidden), atol=1e-5, rtol=1e-5)


def test_it_stands_below_a_final_norm():
    model = tiny_models.model("gpt2", "features")
    outputs = []
    handle = model.h[-1].register_forward_hook(lambda *a: outputs.append(a[2]))
    hidden = (*states(model)[:-1], outputs[0] if outputs[0].ndim == 3 else outputs[0][0])
    handle.remove()
    adapter = ah.attach(model, "scalar-mix")
    tiny_models.scramble(adapter, std=1.0)
    with torch.no_grad():
        found = model(**tiny_models.batch()).last_hidden_state
        normed = model.ln_f(expected_mix(adapter, hidden))
    torch.testing.assert_close(found, normed, atol=1e-5, rtol=1e-5)


def test_it_starts_as_the_mean():
    model = tiny_models.model("bert", "features")
    hidden = states(model)
    ah.attach(model, "scalar-mix")
    with torch.no_grad():
        found = model(**tiny_models.batch()).last_hidden_state
    torch.testing.assert_close(found, sum(hidden) / 3, atol=1e-5, rtol=1e-5)


def test_each_stack_of_an_encoder_decoder_has_its_own_or_one_alone():
    both = ah.attach(tiny_models.model("t5"), "scalar-mix")
    assert [p.site.id for p in both.placed] == ["encoder.mix", "decoder.mix"]
    one = ah.attach(tiny_models.model("t5"), "scalar-mix(sites=['decoder.mix'])")
    assert [p.site.id for p in one.placed] == ["decoder.mix"]


def test_gradients_reach_what_is_under_it():
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "scalar-mix, lora(layers=0)")
    tiny_models.scramble(adapter)
    model(**tiny_models.batch(), labels=torch.tensor([0, 1, 2])).loss.backward()
    assert all(bool(p.grad.any()) for p in adapter.parameters())


def test_a_model_in_training_can_be_copied():
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "scalar-mix")
    tiny_models.scramble(adapter)
    tiny_models.enable_gradient_checkpointing(model)
    model.train()
    model(**tiny_models.batch(), labels=torch.tensor([0, 1, 2])).loss.backward()
    other = copy.deepcopy(model).eval()
    model.eval()
    with torch.no_grad():
        expected = model(**tiny_models.batch()).logits
        assert torch.equal(other(**tiny_models.batch()).logits, expected)


def test_nothing_of_a_forward_pass_is_kept():
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "scalar-mix")
    model(**tiny_models.batch(), labels=torch.tensor([0, 1, 2])).loss.backward()
    slot = model.get_submodule(adapter.placed[0].site.host)._modules["adapterhub"]
    assert slot.states == {}


def test_two_adapters_share_the_place():
    model = tiny_models.model("bert")
    first = ah.attach(model, "scalar-mix", name="first")
    with torch.no_grad():
        expected = model(**tiny_models.batch()).logits
    second = ah.attach(model, "scalar-mix", name="second")
    tiny_models.scramble(second)
    ah.activate(model, "first")
    with torch.no_grad():
        assert torch.equal(model(**tiny_models.batch()).logits, expected)
    first.detach()
    second.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

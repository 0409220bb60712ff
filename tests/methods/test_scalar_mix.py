"""Scalar mix: its equation, on the hidden states that transformers returns."""

from __future__ import annotations

import copy

import pytest
import torch

import adapterhub as ah
from adapterhub.hooks.composition import kept_values
from adapterhub.hooks.slot import Slot
from tests.kit import tiny_models
from tests.kit.tiny_models import hidden_states


def expected_mix(adapter, hidden):
    """Compute gamma sum_j softmax(w)_j h_j."""
    mix = adapter.placed[0].module
    shares = mix.w.detach().softmax(0)
    return mix.gamma.detach() * sum(s * h for s, h in zip(shares, hidden, strict=True))


@pytest.mark.parametrize("architecture", ["bert", "distilbert"])
def test_the_output_is_the_mean_at_first_and_then_equation_1(architecture):
    model = tiny_models.model(architecture, "features")
    hidden = hidden_states(model)
    assert len(hidden) == 3
    adapter = ah.attach(model, "scalar-mix")
    with torch.no_grad():
        output = model(**tiny_models.batch()).last_hidden_state
        torch.testing.assert_close(output, sum(hidden) / 3, atol=1e-5, rtol=1e-5)
        tiny_models.scramble(adapter, std=1.0)
        output = model(**tiny_models.batch()).last_hidden_state
        torch.testing.assert_close(output, expected_mix(adapter, hidden), atol=1e-5, rtol=1e-5)
    (slot,) = (module for module in model.modules() if isinstance(module, Slot))
    assert not kept_values(slot), "nothing is kept behind a pass"


def test_the_mix_enters_below_a_final_norm():
    model = tiny_models.model("gpt2", "features")
    outputs = []
    handle = model.h[-1].register_forward_hook(lambda *a: outputs.append(a[2]))
    hidden = (*hidden_states(model)[:-1], outputs[0] if outputs[0].ndim == 3 else outputs[0][0])
    handle.remove()
    adapter = ah.attach(model, "scalar-mix")
    tiny_models.scramble(adapter, std=1.0)
    with torch.no_grad():
        output = model(**tiny_models.batch()).last_hidden_state
        expected = model.ln_f(expected_mix(adapter, hidden))
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_a_model_in_training_can_be_copied():
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "scalar-mix, lora(layers=0)")
    tiny_models.scramble(adapter)
    tiny_models.enable_gradient_checkpointing(model)
    model.train()
    model(**tiny_models.batch(), labels=torch.tensor([0, 1, 2])).loss.backward()
    assert all(bool(p.grad.any()) for p in adapter.parameters()), "below the mix, too"
    other = copy.deepcopy(model).eval()
    model.eval()
    with torch.no_grad():
        expected = model(**tiny_models.batch()).logits
        assert torch.equal(other(**tiny_models.batch()).logits, expected)

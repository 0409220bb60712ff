"""P-tuning: the prompt that its network computes, and its size."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import adapterhub as ah
from adapterhub.errors import ConfigError
from tests.kit import tiny_models


def attached(spec):
    adapter = ah.attach(tiny_models.model("bert", "features"), spec)
    tiny_models.scramble(adapter)
    tensors = {n.partition(".p-tuning.")[2]: t.detach() for n, t in adapter.tensors().items()}
    return adapter, adapter.placed[0].module, tensors


def linear(tensors, name, x):
    return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]


def test_the_mlp_encoder_is_its_equation():
    """h = W3 relu(W2 relu(W1 P))."""
    _, module, tensors = attached("p-tuning(length=4, middle=6)")
    middle = F.relu(linear(tensors, "head.0", tensors["prompt"]))
    expected = linear(tensors, "head.4", F.relu(linear(tensors, "head.2", middle)))
    torch.testing.assert_close(module().detach(), expected, atol=1e-5, rtol=1e-5)


def test_the_lstm_encoder_is_its_equation():
    """h = W2 relu(W1 LSTM(P)), with two bidirectional layers."""
    _, module, tensors = attached("p-tuning(length=4, middle=6, encoder=lstm)")
    states = tensors["prompt"]
    for layer in (0, 1):
        both = [lstm(tensors, layer, states, reverse) for reverse in (False, True)]
        states = torch.cat(both, dim=1)
    expected = linear(tensors, "head.2", F.relu(linear(tensors, "head.0", states)))
    torch.testing.assert_close(module().detach(), expected, atol=1e-5, rtol=1e-5)


def lstm(tensors, layer, inputs, reverse):
    """Run one direction of an LSTM layer by its equations."""
    end = f"_l{layer}" + ("_reverse" if reverse else "")
    weight = {
        n: tensors[f"lstm.{n}{end}"] for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    }
    h = c = torch.zeros(weight["weight_hh"].shape[1])
    outputs = []
    for x in inputs.flip(0) if reverse else inputs:
        gates = weight["weight_ih"] @ x + weight["weight_hh"] @ h
        i, f, g, o = (gates + weight["bias_ih"] + weight["bias_hh"]).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    states = torch.stack(outputs)
    return states.flip(0) if reverse else states


def test_the_count_includes_the_network():
    mlp, _, _ = attached("p-tuning(length=4, middle=6)")
    assert mlp.count() == 4 * 32 + 6 * (32 + 1) + 6 * (6 + 1) + 32 * (6 + 1)
    recurrent, _, tensors = attached("p-tuning(length=4, middle=6, encoder=lstm)")
    assert recurrent.count() == sum(t.numel() for t in tensors.values())
    assert recurrent.count() == recurrent.methods[0].count(recurrent.anatomy)


def test_an_unknown_encoder_is_refused():
    with pytest.raises(ConfigError) as error:
        attached("p-tuning(encoder=gru)")
    assert "gru" in str(error.value)

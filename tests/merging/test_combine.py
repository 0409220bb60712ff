"""`ah.combine` as a user calls it; the contract suite combines every method."""

from __future__ import annotations

import pytest
import tiny_models
import torch

import adapterhub as ah
from adapterhub.adapters.state import get_state
from adapterhub.errors import AttachError, ConfigError


@pytest.fixture
def model():
    model = tiny_models.model("bert")
    for seed, (name, rank) in enumerate({"a": 2, "b": 3}.items()):
        spec = f"lora(rank={rank}, sites=['attn.q'])"
        tiny_models.scramble(ah.attach(model, spec, name=name), seed=seed)
    return model


def update(adapter, layer=0):
    tensors = adapter.tensors()
    a, b = (tensors[f"encoder.{layer}.attn.q.lora.{name}"] for name in "AB")
    return adapter.placed[0].module.scale * b @ a


def test_a_linear_combination_of_lora_is_exact(model):
    adapters = get_state(model).adapters.copy()
    combined = ah.combine(model, ["a", "b"], weights=[0.25, -1.0])
    expected = 0.25 * update(adapters["a"]) - update(adapters["b"])
    torch.testing.assert_close(update(combined), expected)
    assert combined.tensors()["encoder.0.attn.q.lora.A"].shape[0] == 2 + 3
    assert combined.active


def test_a_smaller_rank_reports_what_is_lost(model):
    combined = ah.combine(model, ["a", "b"], rank=1)
    assert combined.tensors()["encoder.0.attn.q.lora.A"].shape[0] == 1
    assert 0 < combined.metadata.training["combined"]["lost"] < 1


def test_every_option_out_of_range_is_listed(model):
    with pytest.raises(ConfigError) as error:
        ah.combine(model, ["a", "b"], weights=[1.0], density=2.0, rank=0)
    assert len(error.value.offenders) == 3
    with pytest.raises(ConfigError, match="did you mean 'linear'"):
        ah.combine(model, ["a", "b"], how="linar")


def test_a_missing_adapter_is_refused_and_nothing_changes(model):
    ah.activate(model, "a")
    with pytest.raises(AttachError, match="'c'"):
        ah.combine(model, ["a", "c"])
    assert get_state(model).adapters["a"].active


def test_other_labels_are_noted(model):
    first, second = get_state(model).adapters.values()
    second.head.labels["id2label"] = {0: "x", 1: "y"}
    with pytest.warns(UserWarning, match="keeps the head of 'a'"):
        combined = ah.combine(model, ["a", "b"])
    assert combined.labels == first.labels

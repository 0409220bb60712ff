"""Several adapters on one backbone do not affect each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import adapterhub as ah
from adapterhub.errors import AttachError
from adapterhub.methods import METHODS
from tests.kit import tiny_models
from tests.kit.matrix import example
from tests.kit.tiny_models import logits

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["attach", "activate", "detach", "none"]), st.integers(0, 2)),
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(actions=ACTIONS, methods=st.lists(st.sampled_from(sorted(METHODS)), min_size=3, max_size=3))
def test_no_sequence_of_actions_affects_another_adapter(actions, methods):
    """Attaching, activating or detaching an adapter keeps the others' values and outputs."""
    model = tiny_models.model("bert")
    bare = logits(model)
    live: dict[int, ah.Adapter] = {}
    expected: dict[int, torch.Tensor] = {}
    for action, number in actions:
        if action == "attach" and number not in live:
            live[number] = ah.attach(model, example(methods[number]), name=str(number))
            tiny_models.scramble(live[number], seed=number)
            expected[number] = logits(model)
        elif action == "activate" and number in live:
            ah.activate(model, str(number))
            assert torch.equal(logits(model), expected[number])
        elif action == "detach" and number in live:
            live.pop(number).detach()
        elif action == "none" and live:
            ah.activate(model)
            assert torch.equal(logits(model), bare)
        for adapter in live.values():
            assert all(p.requires_grad for p in adapter.parameters())
        active = {id(p) for a in live.values() if a.active for p in a.parameters()}
        attached = {id(p) for a in live.values() for p in a.parameters()}
        trainable = {id(p) for p in model.parameters() if p.requires_grad}
        assert not live or active <= trainable <= attached
    for number, adapter in live.items():
        ah.activate(model, str(number))
        assert torch.equal(logits(model), expected[number])
        adapter.detach()
    assert torch.equal(logits(model), bare)


def test_each_model_keeps_its_number_of_labels():
    model = tiny_models.model("bert", num_labels=2)
    ah.attach(model, "lora", name="two")
    labels = {"id2label": {i: c for i, c in enumerate("abcde")}}
    five = ah.attach(tiny_models.model("bert", num_labels=5, **labels), "lora", name="five")
    assert five.labels == tuple("abcde")
    assert logits(model).shape[-1] == 2


def test_two_adapters_that_change_one_parameter_cannot_both_be_active():
    model = tiny_models.model("bert")
    ah.attach(model, "full", name="a")
    ah.attach(model, "freeze", name="b")
    with pytest.raises(AttachError, match="both train"):
        ah.activate(model, "a", "b")

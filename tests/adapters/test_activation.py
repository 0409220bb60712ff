"""Activations are objects: what `on` changes, `off` undoes."""

from __future__ import annotations

import pytest
import tiny_models
import torch

import adapterhub as ah
from adapterhub.adapters.activation import PerRowActivation, StackActivation, activation_of
from adapterhub.adapters.parts import LABEL_FIELDS
from adapterhub.adapters.state import get_state
from adapterhub.errors import AttachError


@pytest.fixture
def model():
    model = tiny_models.model("bert")
    for seed, name in enumerate(("a", "b")):
        tiny_models.scramble(ah.attach(model, "lora(rank=2)", name=name), seed=seed)
    ah.activate(model)
    return model


def labels(model):
    return {name: getattr(model.config, name) for name in LABEL_FIELDS}


@pytest.mark.parametrize(
    ("compositions", "kind"),
    [
        ([("a", "b")], StackActivation),
        ([()], StackActivation),
        (["a", "b", ()], PerRowActivation),
        ([ah.Average(["a", "b"])], PerRowActivation),
    ],
)
def test_off_undoes_on(model, compositions, kind):
    before, bare = labels(model), model(**tiny_models.batch()).logits
    modules = [name for name, _ in model.named_modules()]
    activation = activation_of(model, get_state(model).adapters, compositions)
    assert isinstance(activation, kind)
    activation.on()
    changed = model(**tiny_models.batch()).logits
    assert torch.equal(changed, bare) == (compositions == [()])
    activation.off()
    assert torch.equal(model(**tiny_models.batch()).logits, bare)
    assert labels(model) == before
    assert [name for name, _ in model.named_modules()] == modules


def test_a_stack_without_one_adapter_keeps_the_others_active(model):
    state = get_state(model)
    ah.activate(model, "a", "b")
    rest = state.activation.without(state.adapters["a"])
    assert rest.compositions == (("b",),)
    assert not state.adapters["a"].active
    assert state.adapters["b"].active


def test_an_average_cannot_lose_a_part(model):
    state = get_state(model)
    ah.activate(model, ah.Average(["a", "b"]))
    with pytest.raises(AttachError, match="part of the active average"):
        state.activation.without(state.adapters["a"])


def test_adapters_that_change_the_whole_batch_are_not_routed(model):
    ah.attach(model, "bitfit", name="biases")
    with pytest.raises(AttachError, match="cannot be routed per row") as error:
        activation_of(model, get_state(model).adapters, ["a", "biases"])
    assert error.value.offenders == ("'biases': bitfit",)
    assert "lora" in error.value.expected

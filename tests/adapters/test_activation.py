"""Activations are objects: what `on` changes, `off` undoes."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.adapters.activation import (
    AverageActivation,
    PerRowActivation,
    StackActivation,
    activation_of,
    route_activation_of,
)
from adapterhub.adapters.state import get_state
from adapterhub.anatomy.backbone import LABEL_FIELDS, Backbone
from tests.kit import tiny_models


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
    ("composition", "kind"),
    [
        (("a", "b"), StackActivation),
        ((), StackActivation),
        (ah.Average(["a", "b"]), AverageActivation),
    ],
)
def test_off_undoes_on(model, composition, kind):
    before, bare = labels(model), model(**tiny_models.batch()).logits
    modules = [name for name, _ in model.named_modules()]
    activation = activation_of(Backbone.of(model), get_state(model).adapters, composition)
    assert isinstance(activation, kind)
    assert activation.replaces == (composition != ())
    activation.prepare()
    activation.on()
    activation.off()
    activation.close()
    assert torch.equal(model(**tiny_models.batch()).logits, bare)
    assert labels(model) == before
    assert [name for name, _ in model.named_modules()] == modules


@pytest.mark.parametrize(
    ("compositions", "kind"),
    [
        (["a", "b", ()], PerRowActivation),
        (["a", "a"], PerRowActivation),
        (["biases", "biases"], StackActivation),
    ],
)
def test_a_route_replaces_parts_of_the_model_only_for_one_adapter(model, compositions, kind):
    ah.attach(model, "bitfit", name="biases")
    activation = route_activation_of(Backbone.of(model), get_state(model).adapters, compositions)
    assert type(activation) is kind
    assert activation.replaces == (kind is StackActivation)


def test_a_stack_without_one_adapter_keeps_the_others(model):
    state = get_state(model)
    ah.activate(model, "a", "b")
    rest = state.activation.without(state.adapters["a"])
    assert rest.compositions == (("b",),)

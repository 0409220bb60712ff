"""Activations are objects: what `on` changes, `off` undoes."""

from __future__ import annotations

import pytest

import adapterhub as ah
from adapterhub.adapters.activation import (
    PerRowActivation,
    StackActivation,
    route_activation_of,
)
from adapterhub.adapters.state import get_state
from adapterhub.anatomy.backbone import Backbone
from tests.kit import tiny_models


@pytest.fixture
def model():
    model = tiny_models.model("bert")
    for seed, name in enumerate(("a", "b")):
        tiny_models.scramble(ah.attach(model, "lora(rank=2)", name=name), seed=seed)
    ah.activate(model)
    return model


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

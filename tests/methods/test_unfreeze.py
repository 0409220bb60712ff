"""Gradual unfreezing: the stage and the learning rate of each layer."""

from __future__ import annotations

import pytest

import adapterhub as ah
from adapterhub.errors import ConfigError
from adapterhub.methods.unfreeze import Unfreeze
from tests.kit import tiny_models


def plan(method, architecture="bert", **config):
    anatomy = ah.anatomy_of(tiny_models.model(architecture, **config))
    return {anatomy.key(step.path): step for step in method.plan(anatomy)}


def test_layers_join_from_the_top_and_embeddings_last():
    steps = plan(Unfreeze(), num_hidden_layers=3)
    stages = [steps[f"encoder.{n}.ffn.up.weight"].stage for n in (2, 1, 0)]
    assert stages == [0, 1, 2]
    assert steps["backbone.pooler.dense.weight"].stage == 0
    assert {s.stage for name, s in steps.items() if "embeddings" in name} == {3}


def test_a_group_can_have_several_layers():
    steps = plan(Unfreeze(size=2), num_hidden_layers=3)
    assert [steps[f"encoder.{n}.ffn.up.weight"].stage for n in (2, 1, 0)] == [0, 0, 1]
    assert {s.stage for name, s in steps.items() if "embeddings" in name} == {2}


def test_the_learning_rate_decays_from_group_to_group():
    """Equations 1 and 2: each group has the rate of the group above divided by 2.6."""
    steps = plan(Unfreeze())
    assert all(step.rate == pytest.approx(2.6**-step.stage) for step in steps.values())
    assert {step.stage for step in steps.values()} == {0, 1, 2}


def test_the_count_is_that_of_the_backbone():
    model = tiny_models.model("bert")
    expected = sum(p.numel() for p in model.base_model.parameters())
    adapter = ah.attach(model, "unfreeze")
    assert adapter.count() == expected == adapter.methods[0].count(adapter.anatomy)


@pytest.mark.parametrize("options", [{"size": 0}, {"decay": 0}, {"every": 0}])
def test_an_option_out_of_range_is_refused(options):
    with pytest.raises(ConfigError) as error:
        Unfreeze(**options)
    assert next(iter(options)) in str(error.value)

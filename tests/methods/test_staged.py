"""Staged fine-tuning: which group a parameter belongs to, and from which stage it trains."""

from __future__ import annotations

import pytest

import adapterhub as ah
from adapterhub.errors import ConfigError
from adapterhub.methods.staged import Staged
from tests.kit import tiny_models


def stages(architecture, *groups):
    anatomy = ah.anatomy_of(tiny_models.model(architecture))
    return {
        anatomy.key(path): stage for path, stage in Staged(groups=groups).stages(anatomy).items()
    }


def test_the_first_group_that_matches_a_parameter_decides():
    stage = stages("bert", "top 1", "norms", "everything")
    assert stage["encoder.1.ffn.up.weight"] == 0
    assert stage["encoder.1.ffn.norm.weight"] == 0, "a norm of the top layer"
    assert stage["encoder.0.ffn.norm.weight"] == 1
    assert stage["encoder.0.ffn.up.weight"] == 2
    anatomy = ah.anatomy_of(tiny_models.model("bert"))
    assert len(stage) == len(anatomy.parameters())


def test_a_group_joins_words_and_patterns():
    stage = stages("bert", "norms + encoder.0.attn.q.*", "embeddings")
    assert stage["encoder.0.attn.q.bias"] == stage["encoder.1.ffn.norm.bias"] == 0
    assert {s for name, s in stage.items() if "word_embeddings" in name} == {1}
    assert "encoder.1.attn.q.bias" not in stage, "a parameter in no group stays frozen"


def test_the_count_is_that_of_all_groups():
    model = tiny_models.model("bert")
    modules = (model.bert.encoder.layer[1], model.bert.pooler, model.bert.embeddings)
    expected = sum(p.numel() for module in modules for p in module.parameters())
    adapter = ah.attach(model, "staged(groups=['top 1', 'embeddings'])")
    assert adapter.count() == expected == adapter.methods[0].count(adapter.anatomy)


@pytest.mark.parametrize("group", ["top 0", "norm", "encoder.9.*"])
def test_a_group_without_parameters_is_refused(group):
    with pytest.raises(ConfigError) as error:
        stages("bert", group)
    assert group in str(error.value)


@pytest.mark.parametrize("options", [{"every": 0}, {"patience": 0}, {"decay": 0}])
def test_a_schedule_out_of_range_is_refused(options):
    with pytest.raises(ConfigError) as error:
        Staged(**options)
    assert next(iter(options)) in str(error.value)

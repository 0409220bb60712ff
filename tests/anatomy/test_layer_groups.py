"""What was found in the layers of a model, and what was not."""

from __future__ import annotations

import every_type
import pytest

import adapterhub as ah
from adapterhub.anatomy import FAMILIES
from adapterhub.anatomy.sites import layer_groups
from tests.kit import tiny_models


def groups_of(model_type):
    auto = every_type.autos(model_type, every_type.ADAPTED)[0]
    return layer_groups(ah.anatomy_of(every_type.build(model_type, auto)))


def test_equal_layers_are_one_group():
    (group,) = groups_of("llama")
    assert group.layers == tuple(range(6))
    assert group.found[:3] == ("attn", "attn.k", "attn.kv")
    assert group.missing == group.other_weights == ()


def test_layers_of_two_kinds_are_two_groups():
    mixers, attention = groups_of("qwen3_next")
    assert attention.layers == (3,)
    assert mixers.layers == (0, 1, 2, 4, 5)
    assert "attn.kv" in attention.found
    assert "mixer" in {role.partition(".")[0] for role in mixers.found}
    assert attention.experts == mixers.experts == 512
    assert {"ffn.experts.gate_up", "ffn.experts.down", "ffn.router"} <= {*attention.found}
    assert not [path for path in attention.other_weights if "experts." in path or "gate" in path]


def test_biases_of_experts_are_other_weights():
    (group,) = groups_of("gpt_oss")
    assert group.experts
    assert group.other_weights == (
        "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down_proj_bias",
    )


@pytest.mark.parametrize(
    ("model_type", "missing"),
    [
        ("persimmon", ("q, k and v in attn.qkv",)),
        ("nystromformer", ("keys and values in attn",)),
        ("rembert", ()),
        ("mamba", ("a feed-forward network",)),
    ],
)
def test_what_was_not_found_is_said(model_type, missing):
    (group,) = groups_of(model_type)
    assert group.missing == missing


def test_every_layer_is_in_one_group(subtests):
    for architecture in tiny_models.CORE:
        with subtests.test(architecture):
            check_groups(architecture)


def check_groups(architecture):
    anatomy = ah.anatomy_of(tiny_models.usual_model(architecture))
    groups = layer_groups(anatomy)
    for stack in FAMILIES[architecture].stacks:
        numbers = [n for group in groups if group.stack == stack.name for n in group.layers]
        assert sorted(numbers) == list(range(anatomy.depth(stack.name)))
    sites = {(s.stack, s.layer, s.role) for s in anatomy.sites.values() if s.layer is not None}
    assert sites == {(g.stack, n, role) for g in groups for n in g.layers for role in g.found}

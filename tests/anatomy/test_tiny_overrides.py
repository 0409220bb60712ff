"""Small models of every type: patterns of names make most of them small, a table the others."""

from __future__ import annotations

import every_type
import pytest
import shrink
import sweep_cells
import tiny_overrides
from tiny_overrides import OVERRIDES
from transformers import CONFIG_MAPPING

from tests.kit import tiny_models

# One of each kind: a class to choose, an option that is missing, sizes that depend on each other.
SOME = (
    "bamba",
    "deepseek_v3",
    "deit",
    "lfm2_moe",
    "mamba2",
    "moonshine_streaming",
    "swinv2",
    "zamba",
)
RUNS_WITHOUT = {"clipseg"}  # but reads the first token of a text alone
TYPES = tuple(sorted(OVERRIDES.keys() - RUNS_WITHOUT)) if tiny_models.FULL_MATRIX else SOME


def build(model_type):
    return every_type.build(
        model_type, every_type.autos(model_type, every_type.ADAPTED)[0], tiny=True
    )


def states(model_type):
    """Return whether a type is built, and whether its model runs."""
    model = build(model_type)
    return model is not None, model is not None and sweep_cells.inputs_for(model) is not None


@pytest.mark.parametrize("model_type", TYPES)
def test_an_entry_of_the_table_makes_a_type_small_and_is_needed(model_type, monkeypatch):
    with_entry = states(model_type)
    assert with_entry[0]
    monkeypatch.setattr(shrink, "OVERRIDES", {})
    assert states(model_type) < with_entry


def test_the_table_has_types_of_transformers_only():
    assert set(OVERRIDES) <= set(CONFIG_MAPPING)
    assert list(OVERRIDES) == sorted(OVERRIDES)
    assert tiny_overrides.OVERRIDES is shrink.OVERRIDES


def test_types_that_people_use_are_small(subtests):
    for model_type in ["gemma3n_text", "hubert", "qwen3_next", "segformer", "zamba2"]:
        with subtests.test(model_type=model_type):
            assert (
                sum(p.numel() for p in build(model_type).parameters()) < every_type.MOST_PARAMETERS
            )


def test_a_list_becomes_short_or_small_by_its_name(subtests):
    cases = [
        ("conv_dim", [512] * 7, [64] * 7),
        ("hidden_sizes", [32, 64, 160, 256], [4, 8, 20, 32]),
        ("depths", [2, 2, 6, 2], [2, 2, 2, 2]),
        ("layer_types", ["full"] * 40, ["full"] * shrink.MOST_LAYERS),
        ("layer_types", ["full"] * 3, None),
        ("image_size", [224, 224], None),
    ]
    for name, values, small in cases:
        with subtests.test(name=name):
            assert shrink._shorter(name, values) == ({} if small is None else {name: small})


def test_layers_that_differ_still_differ():
    layers = {"05": {"head_dim": 512}, "11": {"head_dim": 512}}
    assert shrink._fewer(layers) == {5: {"head_dim": 16}}


def test_options_of_a_part_are_merged():
    options = {"text_config": {"hidden_size": 32}, "depth": 6}
    own = {"text_config": {"head_dim": 8}, "depth": 2}
    assert shrink._merged(options, own) == {
        "text_config": {"hidden_size": 32, "head_dim": 8},
        "depth": 2,
    }
    assert options["text_config"] == {"hidden_size": 32}

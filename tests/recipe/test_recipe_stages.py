"""Recipes of stages: layers of options, names of earlier stages, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adapterhub.config.yaml import dump_yaml
from adapterhub.errors import ConfigError
from adapterhub.recipe.sweep import StagedRecipe, read_staged

COMMON = {"backbone": "b", "method": {"lora": {"rank": 4}}, "output": "runs/x", "train": {"lr": 1}}
STAGES = [
    {"name": "first", "task": "masked-lm", "data": {"train": "a.txt"}, "train": {"epochs": 2}},
    {"name": "second", "from": "first", "method": "ia3", "data": {"train": "b.tsv"}, "seed": 3},
]


def staged(folder: Path, *words: str, **changed: Any) -> StagedRecipe | None:
    """Write a recipe, and read it."""
    (folder / "recipe.yaml").write_text(dump_yaml({**COMMON, "stages": STAGES, **changed}))
    return read_staged(folder / "recipe.yaml", words)


def test_a_stage_overrides_what_is_around_it(tmp_path):
    read = staged(tmp_path, "train.epochs=5", "data.rows=9")
    assert read is not None
    first, second = read.stages["first"], read.stages["second"]
    assert (first.task, first.method, first.from_) == ("masked-lm", {"lora": {"rank": 4}}, None)
    assert (second.task, second.method, second.seed) == (None, "ia3", 3)
    assert second.from_ == "./runs/x/first/adapter"
    for recipe in (first, second):
        assert (recipe.backbone, recipe.train.learning_rate) == ("b", 1)
        assert (recipe.train.epochs, recipe.data.rows) == (5, 9), "the command line is for all"
    assert (first.output, second.output) == ("runs/x/first", "runs/x/second")
    assert read.starts == {"first": (), "second": ("first",)}


def test_what_is_written_reads_the_same(tmp_path):
    read = staged(tmp_path, "train.epochs=5", "method=[bitfit, ia3]")
    assert read is not None
    (tmp_path / "again.yaml").write_text(read.to_yaml())
    again = read_staged(tmp_path / "again.yaml")
    assert again is not None
    assert again.stages == read.stages
    assert all(recipe.method == ["bitfit", "ia3"] for recipe in again.stages.values())


def test_a_method_may_be_that_of_an_earlier_stage(tmp_path):
    common = {k: v for k, v in COMMON.items() if k != "method"}
    (tmp_path / "recipe.yaml").write_text(
        dump_yaml({**common, "stages": [STAGES[0], {**STAGES[1], "method": None}]})
    )
    read = read_staged(tmp_path / "recipe.yaml")
    assert read is not None
    assert read.stages["second"].method is None


def test_other_names_stay_references(tmp_path):
    read = staged(tmp_path, stages=[STAGES[0], {**STAGES[1], "from": "hf:someone/polite"}])
    assert read is not None
    assert read.stages["second"].from_ == "hf:someone/polite"
    later = staged(
        tmp_path, stages=[{**STAGES[1], "from": "later"}, {**STAGES[0], "name": "later"}]
    )
    assert later is not None
    assert later.stages["second"].from_ == "later", "only an earlier stage"


def test_a_recipe_without_stages_is_none(tmp_path):
    (tmp_path / "recipe.yaml").write_text(dump_yaml(COMMON))
    assert read_staged(tmp_path / "recipe.yaml") is None
    assert read_staged(None, ["seed=1"]) is None


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ([], "expected: a list of recipes"),
        ("first", "expected: a list of recipes"),
        ([{"task": "masked-lm"}], "stage 1: the name is None"),
        (["first"], "stage 1: the name is None"),
        ([{"name": "../up"}], "the name is '../up'"),
        ([{"name": "adapter"}], "the name is 'adapter'"),
        ([STAGES[0], {"name": "first"}], "two stages are named 'first'"),
        ([{**STAGES[0], "output": "x"}], "stage 'first' has an output"),
        ([{**STAGES[0], "epohcs": 1}], "stage 'first': "),
        ([{"name": "first"}], "data.train is missing"),
    ],
)
def test_invalid_stages(stages, expected, tmp_path):
    with pytest.raises(ConfigError) as error:
        staged(tmp_path, stages=stages)
    assert expected in str(error.value)


def test_an_output_is_needed(tmp_path):
    with pytest.raises(ConfigError, match="no output"):
        staged(tmp_path, output=None)

"""Recipes: file, flags and overrides become one recipe, or one error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adapterhub.errors import ConfigError
from adapterhub.training.recipe import Recipe, read

REQUIRED: dict[str, Any] = {"backbone": "a/b", "output": "out", "data": {"train": "t.tsv"}}


def recipe(text: str, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_overrides_win_over_flags_and_flags_over_the_file(tmp_path: Path) -> None:
    path = recipe("seed: 1\nname: file\ntrain: {epochs: 1, warmup: 0.5}\n", tmp_path)
    flags = REQUIRED | {"seed": 2, "train": {"epochs": 2}}
    merged = read(path, ["train.epochs=3"], flags)
    assert (merged.name, merged.seed, merged.train.epochs) == ("file", 2, 3)
    assert merged.train.warmup == 0.5, "options that are not overridden are kept"


def test_a_method_spec_replaces_the_earlier_one_with_its_options(tmp_path: Path) -> None:
    path = recipe("method: {lora: {rank: 4}}\n", tmp_path)
    assert read(path, flags=REQUIRED).method == {"lora": {"rank": 4}}
    flags = REQUIRED | {"method": {"prefix": {"length": 3}}}
    assert read(path, flags=flags).method == {"prefix": {"length": 3}}


def test_a_recipe_survives_yaml(tmp_path: Path) -> None:
    first = read(None, ["train.learning_rate=1e-3", "new_tokens=[<a>]", "data.rows=5"], REQUIRED)
    assert isinstance(first, Recipe)
    assert read(recipe(first.to_yaml(), tmp_path)) == first


def test_every_missing_option_is_listed() -> None:
    with pytest.raises(ConfigError, match="incomplete") as error:
        read(None, ["data.eval=dev.tsv"])
    missing = ("backbone is missing", "data.train is missing", "output is missing")
    assert error.value.offenders == missing


def test_an_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean '?(train\.)?epochs"):
        read(None, ["train.epoch=3"], REQUIRED)

"""The data of a run, read from its recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapterhub.errors import ConfigError, DataError
from adapterhub.training.recipe import Recipe, read
from adapterhub.training.run_data import read_data


@pytest.fixture
def recipe(backbone: Path, data: tuple[Path, Path], tmp_path: Path):
    """A recipe on the tiny backbone, with overrides."""

    def with_overrides(*words: str) -> Recipe:
        files = {"train": str(data[0]), "eval": str(data[1])}
        flags = {"backbone": str(backbone), "output": str(tmp_path / "run"), "data": files}
        return read(None, words, flags)

    return with_overrides


def test_a_recipe_without_evaluation_data_is_refused(recipe) -> None:
    with pytest.raises(DataError, match="no evaluation data") as error:
        read_data(recipe("data.eval=null"))
    assert "--eval FILE" in error.value.hint


def test_sampling_draws_the_same_rows_for_a_seed(recipe) -> None:
    first, second = (read_data(recipe("data.rows=9", "seed=3")).train for _ in range(2))
    assert first == second
    assert len(first) == 9
    assert len(read_data(recipe("data.rows=9")).evaluation) == 22


def test_a_metric_that_the_task_lacks_is_refused(recipe) -> None:
    with pytest.raises(ConfigError, match=r"unknown metric 'acuracy'.*did you mean 'accuracy'"):
        read_data(recipe("train.best_metric=acuracy"))
    assert read_data(recipe("train.best_metric=matthews"))

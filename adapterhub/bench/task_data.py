"""The rows of a task: those that train, those that select, and those that only test."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from adapterhub.data.examples import data_hash, notes_on_test, sample
from adapterhub.errors import ConfigError
from adapterhub.recipe.recipe import Recipe
from adapterhub.training.run_data import NO_EVALUATION, RunData, divide, read_data, sample_rows

TEST_SHARE = 0.2  # of the training rows, where there are no test data
SPLIT_SEED = 0  # all runs of a study have the same rows


@dataclass(frozen=True)
class TaskData:
    """The rows of one task of a study.

    `run` has the rows to train on and those that select; `test` selects nothing.
    """

    run: RunData
    test: list[Any]
    notes: tuple[str, ...]

    def of(self, rows: int, seed: int) -> RunData:
        """Return the data of a run with some number of training rows, drawn by its seed."""
        return replace(self.run, train=sample(self.run.train, rows, seed), notes=())

    @cached_property
    def digests(self) -> dict[str, str]:
        """The sha256 of each part."""
        parts = {"train": self.run.train, "select": self.run.evaluation, "test": self.test}
        return {name: data_hash(part) for name, part in parts.items()}


def read_task_data(recipe: Recipe, test: str | None, select_rows: int) -> TaskData:
    """Read and split the data of a task.

    Without test data a fifth of the training rows is held out, and without evaluation data a tenth
    of the rest, both in the same shares of each label, and equal texts together.

    Raises:
        ConfigError: the recipe has no evaluation, or test data of a run.
        DataError: the data are missing or broken, do not fit the task, or are too few.
    """
    if recipe.data.eval == NO_EVALUATION:
        raise ConfigError(
            "--eval none: a study selects learning rates and checkpoints by an evaluation",
            hint="leave --eval out; rows are then held out for it",
        )
    if recipe.data.test is not None:
        raise ConfigError(
            f"data.test={recipe.data.test} in a study, which has test data of its own",
            expected="--test FILE (bench.test), or none: a fifth of the training rows is held out",
        )
    if recipe.data.stream:
        raise ConfigError(
            "data.stream=true: a study draws and compares rows in memory",
            hint="leave out data.stream, and choose data.rows",
        )
    most = min(select_rows, recipe.data.eval_rows or select_rows)
    recipe = replace(recipe, seed=SPLIT_SEED)
    if test is not None:
        tested = list(_read(recipe, test).evaluation)
        run = read_data(recipe)
    else:
        whole = read_data(recipe)
        train, tested, note = divide(
            whole.task, list(whole.train), whole.options, SPLIT_SEED, TEST_SHARE, flag="--test"
        )
        run = replace(whole, train=train, notes=(*whole.notes, f"{note} to test"))
    selected = sample_rows(run.task, list(run.evaluation), most, SPLIT_SEED)
    run = replace(run, evaluation=selected)
    notes = [*run.notes, *notes_on_test(run.train, tested, run.labels)]
    sizes = f"{len(run.train):,} rows train, {len(selected):,} select, {len(tested):,} test"
    return TaskData(run, tested, (*dict.fromkeys(notes), sizes))


def _read(recipe: Recipe, source: str) -> RunData:
    return read_data(replace(recipe, data=replace(recipe.data, eval=source, eval_rows=None)))

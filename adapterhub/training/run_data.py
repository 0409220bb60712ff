"""The data of a run: task, examples and labels, read before the backbone is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from adapterhub.data.docstrings import load_docstrings
from adapterhub.data.examples import sample
from adapterhub.errors import DataError
from adapterhub.tasks import Task, parse_task
from adapterhub.training.recipe import Recipe

BUILTIN = "builtin:docstrings"


@dataclass(frozen=True)
class RunData:
    """The examples of a run, its task and its labels."""

    task: Task
    labels: tuple[str, ...]
    train: list[Any]
    evaluation: list[Any]


def read_data(recipe: Recipe) -> RunData:
    """Read the examples of a recipe.

    Raises:
        DataError: the data is missing or broken, or does not fit the task.
    """
    task = parse_task(recipe.task)
    train = sample(_read(recipe, recipe.data.train, task, "train"), recipe.data.rows, recipe.seed)
    evaluation = _read(recipe, recipe.data.eval, task, "eval")
    labels = task.labels(train)
    task.check(labels, evaluation)
    return RunData(task, labels, train, evaluation)


def _read(recipe: Recipe, source: str | None, task: Task, split: str) -> list[Any]:
    if BUILTIN in (source, recipe.data.train):
        return load_docstrings()[("train", "eval").index(split)]
    if source is None:
        raise DataError(
            "the recipe has no evaluation data", hint="--eval FILE (data.eval in the recipe)"
        )
    return task.read(source, recipe.data, split)

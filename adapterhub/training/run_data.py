"""The data of a run: task, examples and labels, read before the backbone is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adapterhub.data.docstrings import load_docstrings
from adapterhub.data.examples import sample
from adapterhub.data.labels import unnamed_note
from adapterhub.errors import ConfigError, DataError, unknown
from adapterhub.tasks import Task, parse_task
from adapterhub.training.recipe import Recipe

BUILTIN = "builtin:docstrings"


@dataclass(frozen=True)
class RunData:
    """The examples of a run, its task and its labels.

    `notes` are sentences for the user, to print before the run starts.
    """

    task: Task
    labels: tuple[str, ...]
    train: list[Any]
    evaluation: list[Any]
    notes: tuple[str, ...] = ()


def read_data(recipe: Recipe) -> RunData:
    """Read the examples of a recipe.

    Raises:
        DataError: the data is missing or broken, or does not fit the task.
    """
    task = parse_task(recipe.task)
    train = sample(_read(recipe, recipe.data.train, task, "train"), recipe.data.rows, recipe.seed)
    evaluation = _read(recipe, recipe.data.eval, task, "eval")
    labels = _labels(task, train, recipe.data.label_names)
    task.check(labels, evaluation)
    _check_metric(task, recipe.train.best_metric, evaluation)
    return RunData(task, labels, train, evaluation, tuple(unnamed_note(labels)))


def _labels(task: Task, train: list[Any], names: Mapping[str, str]) -> tuple[str, ...]:
    """Return the labels in the order of the logits: that of their names, if they have some."""
    if names and not task.has_labels:
        raise ConfigError(
            f"{task.name} has no labels to name", hint="leave out --labels (data.labels)"
        )
    labels = task.labels(train)
    return tuple(names.values()) if labels and names else labels


def _check_metric(task: Task, metric: str | None, evaluation: list[Any]) -> None:
    names = task.metric_names(evaluation)
    if metric is not None and metric not in names:
        raise unknown(
            "metric", metric, names, hint=f"train.best_metric={task.main_metric}, the default"
        )


def _read(recipe: Recipe, source: str | None, task: Task, split: str) -> list[Any]:
    if BUILTIN in (source, recipe.data.train):
        return load_docstrings()[("train", "eval").index(split)]
    if source is None:
        raise DataError(
            "the recipe has no evaluation data", hint="--eval FILE (data.eval in the recipe)"
        )
    return task.read(source, recipe.data, split)

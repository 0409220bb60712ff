"""The command that trains the method which a study recommends."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from adapterhub.bench.results import TaskResult
from adapterhub.bench.study import Study, start_of
from adapterhub.cli.train import FLAGS, MULTIPLE
from adapterhub.config.options import to_dict
from adapterhub.recipe.recipe import Recipe

_FLAG_OF = {path: flag for flag, path in FLAGS.items() if flag not in MULTIPLE}


def train_commands(
    study: Study, results: Sequence[TaskResult], output: Path
) -> dict[tuple[str, int], str]:
    """Return, by task and rows, the command that trains the recommended method on all rows.

    Only the largest number of rows of a task has one: a rate for fewer rows is not that for all.

    Args:
        study: the study.
        results: what it found.
        output: the folder of the study.
    """
    commands, several = {}, len({task.task for task in results}) > 1
    for task in {task.task: task for task in results}.values():  # the last has the most rows
        if (words := _words(study, task, output, several)) is not None:
            commands[task.task, task.rows] = shlex.join(["adapterhub", "train", *words])
    return commands


def _words(study: Study, task: TaskResult, output: Path, several: bool) -> list[str] | None:
    """Return the words of a command; None if no method that was trained is recommended.

    After runs that were too short for a recommendation, it trains with the usual learning rate.
    """
    advice, bench = task.advice, study.bench
    if (method := advice.method or advice.candidate) not in study.labels():
        return None
    found = task.find(str(method))
    if found.rate is None:
        return None
    recipe, spec = study.tasks()[task.task], study.labels()[str(method)]
    place = output / (f"best-{task.task}" if several else "best")
    start = start_of(spec)
    what = spec if isinstance(spec, str) else json.dumps(spec)
    decided = {
        **({"method": what} if start is None else {"from": start}),
        "train.learning_rate": f"{found.rate:g}",
        "train.max_steps": str(found.finals[0].cell.steps),
        "output": str(place),
    }
    if bench.steps is None or bench.budget is not None:
        del decided["train.max_steps"]  # the steps that the command takes, or should take
    if advice.method is None:
        del decided["train.learning_rate"]
    given = {path: text for path, text in _given(recipe) if path not in (*decided, "seed", "name")}
    chosen = {"backbone": str(recipe.backbone), **decided, **given}
    order = [path for path in FLAGS.values() if path in chosen and path in _FLAG_OF]
    flags = [word for path in order for word in (f"--{_FLAG_OF[path]}", chosen[path])]
    return flags + [f"{path}={text}" for path, text in chosen.items() if path not in _FLAG_OF]


def _given(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the options of a recipe that are not the default ones, by their path."""
    yield from _differing(to_dict(recipe), to_dict(Recipe()), "")


def _differing(
    options: Mapping[str, Any], usual: Mapping[str, Any], above: str
) -> Iterator[tuple[str, str]]:
    for name, value in options.items():
        path, default = f"{above}{name}", usual.get(name)
        if isinstance(value, Mapping) and isinstance(default, Mapping) and default:
            yield from _differing(value, default, f"{path}.")
        elif value != default:
            yield path, value if isinstance(value, str) else json.dumps(value)

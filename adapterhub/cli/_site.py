"""Extra content of `adapterhub registry site`: studies, and recipes as commands."""

from __future__ import annotations

import json
import shlex
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from adapterhub.bench.advice import points_text
from adapterhub.bench.records import RecordFolder
from adapterhub.bench.results import MethodResult, TaskResult
from adapterhub.bench.study import RECORDS, STUDY, read_study
from adapterhub.bench.tables import result_title, score_title
from adapterhub.cli._study import differing_options, results_of
from adapterhub.cli.show import methods_text
from adapterhub.cli.train import FLAGS, MULTIPLE
from adapterhub.config.options import to_dict
from adapterhub.files.manifest import Manifest
from adapterhub.pages.leaderboards import Leaderboard, RankedScore, best_first
from adapterhub.pages.site import StudyBoard
from adapterhub.recipe.recipe import Recipe

_LEFT_OUT = ("method", "name", "backbone", "on", "from", "output")
_SPEC_CUT = "..."
_FLAG_OF = {path: flag for flag, path in FLAGS.items() if flag not in MULTIPLE}


def study_boards(folder: Path) -> list[StudyBoard]:
    """Return a leaderboard for each task of the study in a folder, from its records.

    Raises:
        FileError: the study does not have a tested run, or a file is broken.
    """
    study = read_study(folder / STUDY)
    results = results_of(folder, study, tuple(RecordFolder(folder / RECORDS).all()))
    name = folder.resolve().name
    return [
        StudyBoard(name, result_title(task, results), str(study.recipe.backbone), _board(task))
        for task in results
    ]


def _board(task: TaskResult) -> Leaderboard:
    lower = task.score.lower_is_better
    scores = [_score(task, each) for each in task.methods if each.estimate.value is not None]
    seeds = max((len(each.finals) for each in task.methods), default=0)
    note = (
        f"The mean of {seeds} seeds on the same {task.test_rows:,} test rows, after training on "
        f"{task.rows:,}; the 95 % interval is over rows and seeds."
    )
    points = " in points" if task.score.points > 1 else ""
    return Leaderboard(
        f"{task.score.name} on {task.task}",
        note,
        f"{score_title(task)}{points}",
        best_first(scores, lower=lower),
        lower_is_better=lower,
    )


def _score(task: TaskResult, result: MethodResult) -> RankedScore:
    estimate, points = result.estimate, task.score.points
    value = estimate.value or 0.0
    spread = f" ± {points_text(estimate.sd, points)}" if estimate.sd is not None else ""
    ends = [points_text(end, points) for end in (estimate.low, estimate.high) if end is not None]
    return RankedScore(
        result.method,
        value * points,
        points_text(value, points) + spread,
        " to ".join(ends),
        None if estimate.low is None else estimate.low * points,
        None if estimate.high is None else estimate.high * points,
        result.costs.all_trained if result.costs else None,
    )


def command_of(manifest: Manifest) -> str | None:
    """Return the command that trains an adapter again; None if flags cannot express its recipe.

    The record does not contain data paths; the command has FILE instead.
    """
    record = manifest.training.get("recipe")
    method = _method(json.dumps(manifest.methods))
    if not isinstance(record, dict) or record.get("tasks") or manifest.on or _SPEC_CUT in method:
        return None
    words = ["--backbone", manifest.backbone.location, "--method", method, "--train", "FILE"]
    more = []
    for path, value in differing_options(record, _usual()):
        if path.partition(".")[0] in _LEFT_OUT or value is None:
            continue
        if path in _FLAG_OF:
            words += [f"--{_FLAG_OF[path]}", _typed(value)]
        else:
            more.append(f"{path}={_typed(value)}")
    return shlex.join(["adapterhub", "train", *words, *more])


@lru_cache(1024)
def _method(methods: str) -> str:
    """Return the methods of a manifest as typed; cached, since many adapters share a few."""
    return methods_text(json.loads(methods))


@cache
def _usual() -> dict[str, Any]:
    return to_dict(Recipe())


def _typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

"""The runs of `adapterhub train --sweep`: their progress, and what came of them in one table."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from adapterhub.cli._format import (
    bytes_text,
    count_text,
    print_table,
    say,
    seconds_text,
)
from adapterhub.errors import TrainingError, one_line
from adapterhub.files.shown_table import ShownTable
from adapterhub.recipe.recipe import Recipe
from adapterhub.status import Display, display_for_terminal, doing, showing

if TYPE_CHECKING:
    from adapterhub.loop.report import Reporter
    from adapterhub.training.run import Ended


def train_sweep(recipes: Mapping[str, Recipe], *, resume: bool, dry_run: bool, quiet: bool) -> None:
    """Train the runs of a sweep, and print a table of them.

    Args:
        recipes: the recipe of each run by its name; their output is the folder of the sweep.
        resume: continue the runs that have begun; the others begin.
        dry_run: only check the recipes, and list the runs.
        quiet: show no progress.

    Raises:
        TrainingError: at least one of the runs failed; the table says which.
    """
    from adapterhub.loop.processes import is_main
    from adapterhub.training.preflight import check_recipe

    placed = {
        name: replace(recipe, output=str(Path(recipe.output) / name))
        for name, recipe in recipes.items()
    }
    for recipe in placed.values():
        check_recipe(recipe, resume, dry=dry_run)
    if dry_run:
        say(f"{len(placed)} runs")
        for recipe in placed.values():
            say(recipe.output)
        return
    with showing(Display() if quiet or not is_main() else display_for_terminal()):
        ended = _train(placed, resume, quiet)
    if is_main():
        print_sweep(ended)


def _train(placed: Mapping[str, Recipe], resume: bool, quiet: bool) -> dict[str, Ended]:
    with doing("loading torch"):
        from adapterhub.loop.report import reporter_for
        from adapterhub.training.run import run_several

    names = {recipe.output: name for name, recipe in placed.items()}
    numbers = {name: number for number, name in enumerate(placed, 1)}

    def reporter(recipe: Recipe) -> Reporter:
        name = names[recipe.output]
        reports = reporter_for(Path(recipe.output), recipe.train, quiet=quiet)
        reports.note(f"run {numbers[name]} of {len(placed)}: {name}")
        return reports

    runs = run_several(list(placed.values()), reporter, resume=resume)
    return {names[each.recipe.output]: each for each in runs}


def print_sweep(ended: Mapping[str, Ended]) -> None:
    """Print the runs of a sweep, the best one first, and what to type next.

    Args:
        ended: the runs by their name.

    Raises:
        TrainingError: some of them failed.
    """
    done = {name: each for name, each in ended.items() if each.outcome}
    ranked = sorted(done, key=lambda name: _rank(done[name]))
    if ranked:
        print_table(_table(ranked, done))
        _say_next([done[name] for name in ranked])
    failed = {name: each.error for name, each in ended.items() if each.error}
    if failed:
        raise TrainingError(
            f"{len(failed)} of {len(ended)} runs failed",
            offenders=[f"{name}: {one_line(error.problem)}" for name, error in failed.items()],
            hint="the other runs are complete",
        )


def _score(ended: Ended) -> float | None:
    assert ended.outcome
    return ended.outcome.metrics.get(ended.outcome.result.metric)


def _rank(ended: Ended) -> float:
    """Return a number that is smaller for a better run."""
    from adapterhub.pages.run_files import lower_is_better

    score = _score(ended)
    if score is None or score != score:
        return float("inf")
    assert ended.outcome
    return score if lower_is_better(ended.outcome.result.metric) else -score


def _table(names: Iterable[str], ended: Mapping[str, Ended]) -> ShownTable:
    metrics = {e.outcome.result.metric for e in ended.values() if e.outcome}
    columns = ("run", "/".join(sorted(metrics)) or "score", "trained", "adapter", "time")
    rows = []
    for name in names:
        outcome, score = ended[name].outcome, _score(ended[name])
        assert outcome
        shown = "-" if score is None else f"{score:.4f}"
        sizes = count_text(outcome.parameters), bytes_text(outcome.adapter_bytes)
        rows.append((name, shown, *sizes, seconds_text(outcome.result.seconds)))
    return ShownTable(columns, rows, numbers=True)


def _say_next(ranked: list[Ended]) -> None:
    folders = [shlex.quote(each.recipe.output) for each in ranked]
    if len(folders) > 1:
        say(f"{'next':12} adapterhub compare {folders[1]} {folders[0]}")
    say(f"{'' if len(folders) > 1 else 'next':12} adapterhub publish {folders[0]}")

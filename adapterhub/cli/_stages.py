"""The runs of a recipe of stages on the command line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from adapterhub.cli._format import print_table, say, seconds_text
from adapterhub.config.spec import call_text
from adapterhub.errors import ConfigError
from adapterhub.files.shown_table import ShownTable
from adapterhub.recipe.several_runs import StagedRecipe
from adapterhub.status import Display, display_for_terminal, showing
from adapterhub.tasks import parse_task

if TYPE_CHECKING:
    from adapterhub.loop.report import Reporter
    from adapterhub.recipe.recipe import Recipe
    from adapterhub.training.run import RunOutcome


def check_flags(staged: StagedRecipe, given: Mapping[str, object]) -> None:
    """Refuse flags that are for one run.

    Args:
        staged: the recipe.
        given: the values of these flags.

    Raises:
        ConfigError: one of them is set.
    """
    if flags := [flag for flag, value in given.items() if value]:
        raise ConfigError(
            f"a recipe of stages trains several runs, here {len(staged.stages)}",
            hint=f"leave out {', '.join(flags)}",
        )


def train_stages(staged: StagedRecipe, *, resume: bool, dry_run: bool, quiet: bool) -> None:
    """Train the stages of a recipe, and print a table of them.

    Args:
        staged: the recipe.
        resume: continue the run in the output folder.
        dry_run: only check the stages and list them.
        quiet: show no progress.
    """
    from adapterhub.loop.processes import is_main
    from adapterhub.training.run_stages import check_stages, run_stages

    if dry_run:
        _print_plan(staged, check_stages(staged, resume, dry=True))
        return
    numbers = {name: number for number, name in enumerate(staged.stages, start=1)}

    def reporter(name: str, recipe: Recipe) -> Reporter:
        from adapterhub.loop.report import reporter_for

        reports = reporter_for(Path(recipe.output), recipe.train, quiet=quiet)
        reports.note(f"stage {numbers[name]} of {len(numbers)}: {name}")
        return reports

    with showing(Display() if quiet or not is_main() else display_for_terminal()):
        outcomes = run_stages(staged, reporter, resume=resume)
    if is_main():
        _print_outcomes(staged, outcomes)


def _print_plan(staged: StagedRecipe, rest: list[str]) -> None:
    rows = []
    for name, recipe in staged.stages.items():
        start = ", ".join(staged.starts[name] or (recipe.from_ or "-", *recipe.on))
        method = f"that of {start}" if recipe.method is None else _spec_text(recipe.method)
        done = "" if name in rest else " (finished)"
        task, source = parse_task(recipe.task).name, str(recipe.data.train)
        rows.append((f"{name}{done}", start, task, method, source, str(recipe.output)))
    print_table(ShownTable(("stage", "from", "task", "method", "data", "output"), rows))


def _spec_text(spec: object) -> str:
    """Return a method spec as one writes it on the command line."""
    if isinstance(spec, list):
        return " + ".join(map(_spec_text, spec))
    if isinstance(spec, Mapping):
        return ", ".join(call_text(str(name), options or {}) for name, options in spec.items())
    return str(spec)


def _print_outcomes(staged: StagedRecipe, outcomes: dict[str, RunOutcome]) -> None:
    """Print the metrics of each stage that trained, and what to type next."""
    rows = []
    for name in staged.stages:
        if (outcome := outcomes.get(name)) is None:
            rows.append((name, "-", "-", "finished before"))
            continue
        metrics = ", ".join(f"{key} {value:.4f}" for key, value in outcome.metrics.items())
        result = outcome.result
        rows.append((name, f"{result.steps:,}", seconds_text(result.seconds), metrics))
    print_table(ShownTable(("stage", "steps", "time", "metrics"), rows))
    say(f"adapter  {Path(staged.output, 'adapter')}")
    say(f'next     adapterhub predict {shlex.quote(staged.output)} "a text"')

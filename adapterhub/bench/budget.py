"""How long the runs of a study may be within a time, from a few steps of each method."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from adapterhub.bench.cells import Cell, Group
from adapterhub.bench.execute import EVALUATIONS, FIT_ROWS, TaskContext
from adapterhub.bench.in_turns import seconds_in_turns
from adapterhub.bench.search import KEPT, LEAST_STEPS, SHARE
from adapterhub.bench.study import BenchOptions
from adapterhub.bench.task_data import TaskData
from adapterhub.errors import AdapterhubError
from adapterhub.training.defaults import run_options
from adapterhub.training.loading import BackboneLoader
from adapterhub.training.report import Reporter
from adapterhub.training.run import run
from adapterhub.training.stop_signals import Stopped

PROBE_STEPS = 6
EVALUATING = 0.25  # of the time
FEWEST_SELECTING = 200  # rows, if there are as many: fewer would select by chance
OVERHEAD = 1.0  # seconds of a run beside training and evaluations, about


@dataclass(frozen=True)
class StepTime:
    """The seconds of a training step and of an evaluation with one method."""

    step: float
    evaluation: float


@dataclass(frozen=True)
class Affordable:
    """What fits into a time.

    Attributes:
        steps: the steps of a whole run.
        select_rows: the rows that select, at most.
        notes: for the user.
    """

    steps: int
    select_rows: int
    notes: tuple[str, ...]


def affordable(
    groups: Sequence[Group],
    contexts: Mapping[str, TaskContext],
    bench: BenchOptions,
    seconds: float,
    loader: BackboneLoader,
    work: Path,
) -> Affordable:
    """Return the steps of a whole run that fit into a time, and the rows that select.

    Evaluations have `EVALUATING` of the time at most: more rows that select would leave few steps.

    Args:
        groups: what is compared; one that is there twice takes twice the time.
        contexts: the tasks.
        bench: how many rates and seeds.
        seconds: the time.
        loader: loads the backbone.
        work: a folder for short runs.
    """
    known = {
        group: _step_time(group, contexts[group.task], loader, work)
        for group in dict.fromkeys(groups)
    }
    times = [known[group] for group in groups]
    tuning = KEPT * bench.tuning_seeds
    runs = bench.rates + tuning + bench.seeds
    wholes = bench.rates / SHARE + tuning + bench.seeds
    data = [contexts[group.task].data for group in groups]
    evaluating = sum(runs * EVALUATIONS * time.evaluation for time in times)
    share = min(1.0, EVALUATING * seconds / evaluating) if evaluating else 1.0
    all_rows = max(len(each.run.evaluation) for each in data)
    select_rows = max(min(FEWEST_SELECTING, all_rows), int(share * all_rows))
    fixed = evaluating * min(1.0, select_rows / all_rows) + runs * OVERHEAD * len(times)
    fixed += sum(map(partial(_testing, bench.seeds), times, data))
    fixed += sum(seconds_in_turns(time.step) for time in times) if bench.time else 0.0
    per_step = sum(wholes * time.step for time in times)
    steps = int((seconds - fixed) / max(per_step, 1e-9))  # of methods that all fail it is 0
    most = max(group.steps for group in groups)
    chosen = min(max(steps, LEAST_STEPS), most)
    took = (fixed + per_step * chosen) / 60
    said = [f"{chosen:,} steps a run, of at most {most:,}: about {took:,.0f} min for all runs"]
    if select_rows < all_rows:
        said += [f"{select_rows:,} rows select, of {all_rows:,}: evaluations take time too"]
    if steps < LEAST_STEPS:
        said += [f"the budget of {seconds / 60:,.0f} min allows fewer; compare fewer methods"]
    return Affordable(chosen, min(select_rows, bench.select_rows), tuple(said))


def _testing(seeds: int, time: StepTime, data: TaskData) -> float:
    """Return the seconds of the evaluations of final runs, on test and on training rows."""
    rows = len(data.test) + min(FIT_ROWS, len(data.run.train))
    return seeds * time.evaluation * rows / len(data.run.evaluation)


def _step_time(group: Group, context: TaskContext, loader: BackboneLoader, work: Path) -> StepTime:
    """Return the time of a step; that of a method that fails is 0, as its runs end at once.

    Raises:
        Stopped: a signal stopped it.
    """
    cell = Cell(group.task, group.method, group.rows, PROBE_STEPS, group.rate, 0, "search")
    output = work / f"probe-{os.getpid()}"  # another process may plan in the same folder
    shutil.rmtree(output, ignore_errors=True)
    recipe = context.recipe_of(cell, output)
    recipe = replace(recipe, train=replace(recipe.train, eval_every=PROBE_STEPS))
    data = context.data.of(group.rows, 0)
    try:
        result = run(recipe, Reporter(), data=data, loader=loader).result
    except Stopped as error:
        raise Stopped(
            f"stopped by a signal while the steps of {group.method} were measured",
            hint="run the same command again",
        ) from error
    except AdapterhubError:
        return StepTime(0.0, 0.0)
    finally:
        shutil.rmtree(output, ignore_errors=True)
    methods = context.parsed(group.method)
    options = run_options(recipe.train, methods, len(data.train))
    rows = options.batch_size * options.gradient_accumulation
    step = rows / max(result.examples_per_second, 1e-9)
    return StepTime(step, max(result.seconds - step * result.steps, 0.0))

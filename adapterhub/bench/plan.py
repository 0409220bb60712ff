"""Plan a study: its data, its kernels, and its runs within the budget."""

from __future__ import annotations

import bisect
import itertools
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

from adapterhub.anatomy.backbone import Backbone
from adapterhub.backbones.fingerprint import fingerprint
from adapterhub.bench.cells import LEAST_STEPS, SHARE, Cell, Group, expected_runs
from adapterhub.bench.execute import EVALUATIONS, FIT_ROWS, TaskContext, TaskData, read_task_data
from adapterhub.bench.study import (
    BenchOptions,
    Study,
    method_label,
    start_of,
)
from adapterhub.config.yaml import seconds_of
from adapterhub.errors import AdapterhubError, ConfigError
from adapterhub.loop.processes import Stopped
from adapterhub.loop.report import Reporter
from adapterhub.recipe.recipe import Recipe, run_options, usual_steps
from adapterhub.training.loading import (
    BackboneLoader,
    KernelChoice,
    StartingPoint,
    choose_kernels,
    starting_point,
)
from adapterhub.training.run import run

PROBE_STEPS = 6
EVALUATING = 0.25  # of the time
FEWEST_SELECTING = 200  # rows, if available: fewer would select by chance
OVERHEAD = 1.0  # approximate seconds of a run outside training and evaluation
_TOLERANCE = 0.25  # of the time


@dataclass(frozen=True)
class PlannedStudy:
    """A study with its data read, its steps chosen and its runs planned.

    Its contexts contain the data shared by the cells of each task; each group is tuned together.
    """

    study: Study
    contexts: dict[str, TaskContext]
    groups: tuple[Group, ...]
    notes: tuple[str, ...]

    def key(self, cell: Cell) -> str:
        """Return the digest of a cell."""
        return self.contexts[cell.task].key(cell)


def plan_study(study: Study, loader: BackboneLoader, work: Path) -> PlannedStudy:
    """Read the data of a study, choose kernels, and plan its runs within the budget.

    Short runs for planning the budget are made in the folder `work`.

    Raises:
        AdapterhubError: of any type; only `work` is written.
    """
    study, contexts, notes = _contexts(study, loader)
    groups = _groups(study, contexts)
    if study.bench.steps is None and study.bench.budget is not None:
        bench, more = affordable(groups, contexts, study.bench, loader, work)
        study = replace(study, bench=bench)
        study, contexts, _ = _contexts(study, loader)  # fewer rows may be used for selection
        groups = _groups(study, contexts)
        notes += more
    return PlannedStudy(study, contexts, groups, tuple(notes))


def _contexts(
    study: Study, loader: BackboneLoader
) -> tuple[Study, dict[str, TaskContext], list[str]]:
    """Return a study with the kernels of its first task, the context of each task, and notes."""
    contexts: dict[str, TaskContext] = {}
    notes: list[str] = []
    for name, recipe in study.tasks().items():
        test = study.tests().get(name, study.bench.test)
        if study.recipe.dtype is not None:  # as chosen for the first task, or the first time
            recipe = replace(recipe, dtype=study.recipe.dtype, attention=study.recipe.attention)
        contexts[name], own = _context(study, recipe, test, loader)
        notes += [f"{name}: {line}" for line in own]
        fixed = contexts[name].recipe
        study = replace(
            study, recipe=replace(study.recipe, dtype=fixed.dtype, attention=fixed.attention)
        )
    return study, contexts, notes


def _context(
    study: Study, recipe: Recipe, test: str | None, loader: BackboneLoader
) -> tuple[TaskContext, list[str]]:
    """Return the context shared by a task's cells, and notes; the kernels suit the baseline."""
    specs = study.labels()
    data = read_task_data(recipe, test, study.bench.select_rows)
    starts = _starts(specs, recipe)
    usual = TaskContext(recipe, data, specs, "", starts).parsed(study.baseline)
    chosen = KernelChoice(recipe.dtype, recipe.attention)
    if recipe.dtype is None:
        chosen = choose_kernels(recipe, data.run, usual)
    loaded = loader.backbone(recipe, data.run, chosen)
    kernels = loaded.kernels
    fixed = replace(
        recipe,
        dtype=kernels.dtype or (None if Backbone.of(loaded.model).quantization else "fp32"),
        attention=kernels.attention,
        data=data.run.options,
    )
    notes = [*data.notes, *([kernels.note] if kernels.note else [])]
    backbone = fingerprint(recipe.backbone, revision=recipe.revision)
    return TaskContext(fixed, data, specs, backbone, starts), notes


def _starts(specs: Mapping[str, object], recipe: Recipe) -> dict[str, StartingPoint]:
    """Find the adapters that methods start from, by the method's name."""
    names = {label: start_of(spec) for label, spec in specs.items()}
    starts = {
        label: starting_point(replace(recipe, method=None, from_=name))
        for label, name in names.items()
        if name is not None
    }
    return {label: each for label, each in starts.items() if each is not None}


def _groups(study: Study, contexts: dict[str, TaskContext]) -> tuple[Group, ...]:
    return tuple(
        _group(study, name, context, label, rows)
        for name, context in contexts.items()
        for rows in _rows(study, context)
        for label in map(method_label, study.specs())
    )


def _rows(study: Study, context: TaskContext) -> list[int]:
    """Return the numbers of training rows that a task can provide, all rows by default."""
    most = len(context.data.run.train)
    return sorted({min(rows, most) for rows in study.bench.rows or (most,)})


def _group(study: Study, task: str, context: TaskContext, label: str, rows: int) -> Group:
    methods = context.parsed(label)
    steps = usual_steps(context.recipe.train, methods, rows)
    return Group(
        task, label, rows, min(study.bench.steps or steps, steps), methods[0].learning_rate
    )


@dataclass(frozen=True)
class StepTime:
    """The seconds of a training step, an evaluation and the rest of a run of one method."""

    step: float
    evaluation: float
    overhead: float = OVERHEAD


_Timed: TypeAlias = tuple[Group, StepTime, TaskData]


def affordable(
    groups: Sequence[Group],
    contexts: Mapping[str, TaskContext],
    bench: BenchOptions,
    loader: BackboneLoader,
    work: Path,
) -> tuple[BenchOptions, list[str]]:
    """Return options with the steps of a whole run that fit into the budget, and notes.

    Evaluations get at most `EVALUATING` of the time: more selection rows would leave few steps. A
    group that occurs twice takes twice the time. Measuring steps is part of that time.

    Raises:
        ConfigError: even the shortest runs take more than a quarter longer; the error states what
            would fit.
    """
    began, seconds = time.monotonic(), seconds_of(str(bench.budget)) or math.inf
    _step_time(groups[0], contexts[groups[0].task], loader, work)  # the very first run is slower
    known = {
        group: _step_time(group, contexts[group.task], loader, work)
        for group in dict.fromkeys(groups)
    }
    measured = time.monotonic() - began
    timed = [(group, known[group], contexts[group.task].data) for group in groups]
    most = max(group.steps for group in groups)
    plan = partial(_planned, timed, budget=seconds)

    def took(steps: int) -> float:
        return measured + plan(bench, steps).seconds

    # If trials would be too short, they run all steps, so fewer steps may take longer.
    halving = SHARE * (LEAST_STEPS - 1) + 1
    ranges = [(halving, most), (LEAST_STEPS, halving - 1)]
    fitting = (_most_within(took, low, min(high, most), seconds) for low, high in ranges)
    chosen = next((steps for steps in fitting if steps is not None), min(LEAST_STEPS, most))
    if took(chosen) > (1 + _TOLERANCE) * seconds:
        raise _too_little(timed, bench, seconds, measured, took(chosen))
    select_rows = plan(bench, chosen).select_rows
    all_rows = _selecting_rows(timed)
    minutes = took(chosen) / 60
    notes = [f"{chosen:,} steps a run, of at most {most:,}: about {minutes:,.0f} min for all runs"]
    if select_rows < all_rows:
        notes += [f"{select_rows:,} rows select, of {all_rows:,}: evaluations take time too"]
    select_rows = min(select_rows, bench.select_rows)
    return replace(bench, steps=chosen, select_rows=select_rows), notes


def _most_within(took: Callable[[int], float], low: int, high: int, seconds: float) -> int | None:
    """Return the most steps in a range that fit into the time; None if there are none."""
    if low > high or took(low) > seconds:
        return None
    steps = range(low, high + 1)
    return steps[bisect.bisect_right(steps, seconds, key=took) - 1]


class _Plan(NamedTuple):
    """The cost of a study's runs, and the rows for selection."""

    seconds: float
    select_rows: int


def _planned(timed: Sequence[_Timed], bench: BenchOptions, steps: int, budget: float) -> _Plan:
    """Return the cost of runs of so many steps, with one rate beyond the edge for each group."""
    total = evaluating = 0.0
    for group, times, data in timed:
        own = replace(group, steps=min(steps, group.steps))
        more = bench.rates + (bench.rates > 1)
        runs = expected_runs(own, more, bench.seeds, bench.tuning_seeds)
        total += sum(runs) * times.step + len(runs) * times.overhead
        total += _testing(bench.seeds, times, data)
        evaluating += len(runs) * EVALUATIONS * times.evaluation
    all_rows = _selecting_rows(timed)
    share = min(1.0, EVALUATING * budget / evaluating) if evaluating else 1.0
    select_rows = max(min(FEWEST_SELECTING, all_rows), int(share * all_rows))
    return _Plan(total + evaluating * min(1.0, select_rows / all_rows), select_rows)


def _selecting_rows(timed: Sequence[_Timed]) -> int:
    return max(len(data.run.evaluation) for _, _, data in timed)


def _too_little(
    timed: Sequence[_Timed], bench: BenchOptions, budget: float, measured: float, took: float
) -> ConfigError:
    """Return the error that lists smaller studies within the budget."""

    def fits(timed: Sequence[_Timed], bench: BenchOptions) -> bool:
        return measured + _planned(timed, bench, LEAST_STEPS, budget).seconds <= budget

    rates, seeds = range(bench.rates, 0, -1), range(bench.seeds, min(bench.seeds, 2) - 1, -1)
    smaller = sorted(itertools.product(rates, seeds), key=lambda n: (-n[0] * n[1], -n[0]))
    counts = [n for n in smaller if fits(timed, replace(bench, rates=n[0], seeds=n[1]))]
    steps: dict[str, float] = {}
    for group, times, _ in timed:
        steps[group.method] = steps.get(group.method, 0.0) + times.step
    names = sorted(steps, key=steps.__getitem__)
    subsets = [[t for t in timed if t[0].method in names[:n]] for n in range(2, len(names))]
    fewer = [each for each in subsets if fits(each, bench)]
    kept = dict.fromkeys(group.method for group, *_ in (fewer[-1] if fewer else ()))
    hints = [f"--budget {math.ceil(took / 60)}m"]
    hints += [f"--rates {n[0]} --seeds {n[1]}" for n in counts[:1]]
    hints += [f"--methods '{','.join(kept)}'"] * bool(kept)
    return ConfigError(
        f"the shortest runs of this study take about {math.ceil(took / 60)} min, its budget is "
        f"{bench.budget}",
        expected=f"at least {LEAST_STEPS} steps a run: fewer methods, rates or seeds, or more time",
        hint="; or ".join(hints),
    )


def _testing(seeds: int, times: StepTime, data: TaskData) -> float:
    """Return the seconds for evaluating final runs on test and on training rows."""
    rows = len(data.test) + min(FIT_ROWS, len(data.run.train))
    return seeds * times.evaluation * rows / len(data.run.evaluation)


def _step_time(group: Group, context: TaskContext, loader: BackboneLoader, work: Path) -> StepTime:
    """Return the time of a step; 0 for a method that fails, since its runs end at once.

    Raises:
        Stopped: a signal stopped it.
    """
    cell = group.trial(group.rate, PROBE_STEPS)
    output = work / f"probe-{os.getpid()}"  # another process may plan in the same folder
    shutil.rmtree(output, ignore_errors=True)
    recipe = context.recipe_of(cell, output)
    recipe = replace(recipe, train=replace(recipe.train, eval_every=PROBE_STEPS))
    data = context.data.of(group.rows, 0)
    began = time.monotonic()
    try:
        result = run(recipe, Reporter(), data=data, loader=loader).result
    except Stopped as error:
        raise Stopped(
            f"stopped by a signal while the steps of {group.method} were measured",
            hint="run the same command again",
        ) from error
    except AdapterhubError:
        return StepTime(0.0, 0.0, 0.0)
    finally:
        shutil.rmtree(output, ignore_errors=True)
    overhead = max(time.monotonic() - began - result.seconds, 0.0)
    methods = context.parsed(group.method)
    options = run_options(recipe.train, methods, len(data.train))
    rows = options.batch_size * options.gradient_accumulation
    step = rows / max(result.examples_per_second, 1e-9)
    return StepTime(step, max(result.seconds - step * result.steps, 0.0), overhead)

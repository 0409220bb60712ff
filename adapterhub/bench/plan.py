"""What a study runs: its data, its kernels, and its runs within the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from adapterhub.backbones.fingerprint import fingerprint
from adapterhub.backbones.quantized import quantization_of
from adapterhub.bench.budget import affordable
from adapterhub.bench.cells import Cell, Group
from adapterhub.bench.execute import TaskContext
from adapterhub.bench.study import (
    Study,
    method_label,
    seconds_of,
    start_of,
)
from adapterhub.bench.task_data import read_task_data
from adapterhub.training.defaults import usual_steps
from adapterhub.training.kernels import KernelChoice, choose_kernels
from adapterhub.training.loading import BackboneLoader
from adapterhub.training.recipe import Recipe
from adapterhub.training.starting_point import StartingPoint, starting_point


@dataclass(frozen=True)
class PlannedStudy:
    """A study whose data are read and whose runs are planned.

    Attributes:
        study: the study, with the steps of a whole run.
        contexts: what the cells of each task share.
        groups: what is tuned together.
        notes: for the user.
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

    Args:
        study: the study.
        loader: loads the backbone.
        work: a folder for the short runs that the budget is planned with.

    Raises:
        AdapterhubError: of any type; nothing but `work` is written.
    """
    study, contexts, notes = _contexts(study, loader)
    groups = _groups(study, contexts)
    if study.bench.steps is None and study.bench.budget is not None:
        study, said = _within_budget(study, contexts, groups, loader, work)
        study, contexts, _ = _contexts(study, loader)  # fewer rows may select
        groups = _groups(study, contexts)
        notes += said
    return PlannedStudy(study, contexts, groups, tuple(notes))


def _contexts(
    study: Study, loader: BackboneLoader
) -> tuple[Study, dict[str, TaskContext], list[str]]:
    """Return a study with the kernels of its first task, what each task shares, and notes."""
    contexts: dict[str, TaskContext] = {}
    notes: list[str] = []
    for name, recipe in study.tasks().items():
        test = study.tests().get(name, study.bench.test)
        if study.recipe.dtype is not None:  # as was chosen for the first task, or at the first time
            recipe = replace(recipe, dtype=study.recipe.dtype, attention=study.recipe.attention)
        contexts[name], said = _context(study, recipe, test, loader)
        notes += [f"{name}: {line}" for line in said]
        fixed = contexts[name].recipe
        study = replace(
            study, recipe=replace(study.recipe, dtype=fixed.dtype, attention=fixed.attention)
        )
    return study, contexts, notes


def _within_budget(
    study: Study,
    contexts: Mapping[str, TaskContext],
    groups: Sequence[Group],
    loader: BackboneLoader,
    work: Path,
) -> tuple[Study, list[str]]:
    """Return a study whose runs fit into its budget, and notes."""
    seconds = seconds_of(str(study.bench.budget))
    assert seconds is not None
    found = affordable(groups, contexts, study.bench, seconds, loader, work)
    bench = replace(study.bench, steps=found.steps, select_rows=found.select_rows)
    return replace(study, bench=bench), list(found.notes)


def _context(
    study: Study, recipe: Recipe, test: str | None, loader: BackboneLoader
) -> tuple[TaskContext, list[str]]:
    """Return what the cells of a task share, and notes; the kernels suit the baseline."""
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
        dtype=kernels.dtype or (None if quantization_of(loaded.model) else "fp32"),
        attention=kernels.attention,
        data=data.run.options,
    )
    said = [*data.notes, *([kernels.note] if kernels.note else [])]
    backbone = fingerprint(recipe.backbone, revision=recipe.revision)
    return TaskContext(fixed, data, specs, backbone, starts), said


def _starts(specs: Mapping[str, object], recipe: Recipe) -> dict[str, StartingPoint]:
    """Find the adapters that methods start from, by the method's name."""
    names = {label: start_of(spec) for label, spec in specs.items()}
    found = {
        label: starting_point(replace(recipe, method=None, from_=name))
        for label, name in names.items()
        if name is not None
    }
    return {label: each for label, each in found.items() if each is not None}


def _groups(study: Study, contexts: dict[str, TaskContext]) -> tuple[Group, ...]:
    return tuple(
        _group(study, name, context, label, rows)
        for name, context in contexts.items()
        for rows in _rows(study, context)
        for label in map(method_label, study.bench.methods)
    )


def _rows(study: Study, context: TaskContext) -> list[int]:
    """Return the numbers of training rows that a task has enough for, all rows by default."""
    most = len(context.data.run.train)
    return sorted({min(rows, most) for rows in study.bench.rows or (most,)})


def _group(study: Study, task: str, context: TaskContext, label: str, rows: int) -> Group:
    methods = context.parsed(label)
    steps = usual_steps(context.recipe.train, methods, rows)
    return Group(
        task, label, rows, min(study.bench.steps or steps, steps), methods[0].learning_rate
    )

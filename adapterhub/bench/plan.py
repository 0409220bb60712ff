"""What a study runs: its data, its kernels, and its runs within the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from adapterhub.anatomy.build import anatomy_of
from adapterhub.backbones.fingerprint import fingerprint
from adapterhub.backbones.load import meta_model
from adapterhub.backbones.quantized import quantization_of
from adapterhub.backbones.trained_length import max_positions
from adapterhub.bench.budget import affordable
from adapterhub.bench.cells import Cell, Group
from adapterhub.bench.equal_size import count_of, equal_sized, is_near
from adapterhub.bench.equal_time import equal_time_steps
from adapterhub.bench.execute import TaskContext
from adapterhub.bench.forgetting import encode_held, read_held
from adapterhub.bench.in_turns import can_be_timed, time_groups
from adapterhub.bench.study import (
    Study,
    method_label,
    seconds_of,
    start_of,
    with_option,
)
from adapterhub.bench.task_data import read_task_data
from adapterhub.errors import ConfigError
from adapterhub.methods._spec import parse_methods
from adapterhub.recipe.defaults import usual_steps
from adapterhub.recipe.recipe import Recipe
from adapterhub.tasks import Setting, parse_task
from adapterhub.training.kernels import KernelChoice, choose_kernels
from adapterhub.training.loading import BackboneLoader
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
    notes: list[str] = []
    if study.bench.equal_parameters:
        study, said = _with_equal_sizes(study)
        notes += said
    study, contexts, said = _contexts(study, loader)
    notes += said
    groups = _groups(study, contexts)
    if study.bench.steps is None and study.bench.budget is not None:
        study, said = _within_budget(study, contexts, groups, loader, work)
        study, contexts, _ = _contexts(study, loader)  # fewer rows may select
        groups = _groups(study, contexts)
        notes += said
    if study.bench.equal_time:
        study, said = _with_equal_time(study, contexts, groups, loader, work)
        specs = study.labels()
        contexts = {
            name: replace(each, specs=specs, starts=_starts(specs, each.recipe))
            for name, each in contexts.items()
        }
        groups += _equal_groups(study, groups)
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
    counted = (*groups, *_in_the_time_of_the_baseline(study, groups))
    found = affordable(counted, contexts, study.bench, seconds, loader, work)
    bench = replace(study.bench, steps=found.steps, select_rows=found.select_rows)
    return replace(study, bench=bench), list(found.notes)


def _in_the_time_of_the_baseline(study: Study, groups: Sequence[Group]) -> list[Group]:
    """Return, for each method that will have the baseline's time as well, the baseline's group."""
    if not study.bench.equal_time:
        return []
    usual = {(g.task, g.rows): g for g in groups if g.method == study.baseline}
    return [usual[g.task, g.rows] for g in groups if g.method != study.baseline]


def _with_equal_time(
    study: Study,
    contexts: Mapping[str, TaskContext],
    groups: Sequence[Group],
    loader: BackboneLoader,
    work: Path,
) -> tuple[Study, list[str]]:
    """Return a study with the steps that take the baseline's time, and notes.

    They are chosen once: by a few steps of each method in turns.

    Raises:
        ConfigError: layers are compiled, so that a few steps do not tell the time of many.
    """
    if study.bench.equal_steps:
        return study, []
    if not all(map(can_be_timed, contexts.values())):
        raise ConfigError(
            "equal time with train.compile=true: a few steps do not tell the time of many",
            hint="train.compile=false, or leave equal_time out",
        )
    chosen, notes = [], []
    for name, context in contexts.items():
        own = [group for group in groups if group.task == name]
        timings = time_groups(context, own, loader, work)
        found, said = equal_time_steps(own, timings, study.baseline)
        chosen += [asdict(each) for each in found]
        notes += said
    return replace(study, bench=replace(study.bench, equal_steps=tuple(chosen))), notes


def _equal_groups(study: Study, groups: Sequence[Group]) -> tuple[Group, ...]:
    places = {(group.task, group.method, group.rows): group for group in groups}
    return tuple(
        replace(places[each.task, each.method, each.rows], method=each.label, steps=each.steps)
        for each in study.equal_steps()
        if (each.task, each.method, each.rows) in places
    )


def _context(
    study: Study, recipe: Recipe, test: str | None, loader: BackboneLoader
) -> tuple[TaskContext, list[str]]:
    """Return what the cells of a task share, and notes; the kernels suit the baseline."""
    specs = study.labels()
    data = read_task_data(recipe, test, study.bench.select_rows)
    held = read_held(study.bench.held, data.run.task) if study.bench.held else None
    starts = _starts(specs, recipe)
    usual = TaskContext(recipe, data, specs, "", starts=starts).parsed(study.baseline)
    chosen = KernelChoice(recipe.dtype, recipe.attention)
    if recipe.dtype is None:
        chosen = choose_kernels(recipe, data.run, usual)
    loaded = loader.backbone(recipe, data.run, chosen)
    kernels = loaded.kernels
    if held is not None:  # a tokenizer without what the text needs is refused now
        setting = Setting(loaded.processor, max_positions(loaded.model))
        encode_held(held, data.run.task.head, setting)
    fixed = replace(
        recipe,
        dtype=kernels.dtype or (None if quantization_of(loaded.model) else "fp32"),
        attention=kernels.attention,
        data=data.run.options,
    )
    said = [*data.notes, *([kernels.note] if kernels.note else [])]
    backbone = fingerprint(recipe.backbone, revision=recipe.revision)
    return TaskContext(fixed, data, specs, backbone, held, starts), said


def _starts(specs: Mapping[str, object], recipe: Recipe) -> dict[str, StartingPoint]:
    """Find the adapters that methods start from, by the method's name."""
    names = {label: start_of(spec) for label, spec in specs.items()}
    found = {
        label: starting_point(replace(recipe, method=None, from_=name))
        for label, name in names.items()
        if name is not None
    }
    return {label: each for label, each in found.items() if each is not None}


def _with_equal_sizes(study: Study) -> tuple[Study, list[str]]:
    """Return a study with further methods, of the baseline's size, and notes."""
    recipe = next(iter(study.tasks().values()))
    task = parse_task(recipe.task)
    revision, family = recipe.revision, recipe.family
    model = meta_model(recipe.backbone, task=task.head, revision=revision, family=family)
    anatomy = anatomy_of(model)
    if start_of(study.labels()[study.baseline]) is not None:
        raise ConfigError(
            f"equal parameters with the baseline {study.baseline!r}, an adapter's method",
            hint="name the method as the baseline: --baseline lora",
        )
    target = count_of(parse_methods(study.labels()[study.baseline]), anatomy)  # type: ignore[arg-type]
    specs = list(study.bench.methods)
    notes = []
    for label, spec in study.labels().items():
        if start_of(spec) is not None:  # its size is that of the adapter
            continue
        methods = parse_methods(spec)  # type: ignore[arg-type]
        count = count_of(methods, anatomy)
        other = equal_sized(methods[0], target, anatomy) if len(methods) == 1 else None
        if other is not None:
            changed = with_option(spec, str(other.sized_by), getattr(other, str(other.sized_by)))
            specs += [] if changed in specs else [changed]
            sized = f"also as {method_label(changed)}, {other.count(anatomy):,}"
            notes.append(f"{label} has {count:,} parameters; {sized}")
        elif not is_near(count, target):
            notes.append(f"{label} has {count:,} parameters, and no size with about {target:,}")
    notes.append(f"{study.baseline} has {target:,} parameters")
    bench = replace(study.bench, methods=tuple(specs), equal_parameters=False)
    return replace(study, bench=bench), notes


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

"""A study from its options to its last record: read, plan, and run what is not done yet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from adapterhub.anatomy.build import anatomy_of
from adapterhub.backbones.fingerprint import fingerprint
from adapterhub.backbones.load import meta_model
from adapterhub.bench.budget import affordable
from adapterhub.bench.cells import Cell, Group, Shard
from adapterhub.bench.claims import Claims
from adapterhub.bench.equal_size import count_of, equal_sized, is_near
from adapterhub.bench.equal_time import equal_time_steps
from adapterhub.bench.execute import TaskContext, run_cell
from adapterhub.bench.forgetting import encode_held, read_held
from adapterhub.bench.in_turns import can_be_timed, time_groups
from adapterhub.bench.records import CellRecord, RecordFolder
from adapterhub.bench.search import RateChoice, final_cell, next_cells
from adapterhub.bench.study import (
    BenchOptions,
    Study,
    method_label,
    read_study,
    seconds_of,
    start_of,
    with_option,
)
from adapterhub.bench.task_data import read_task_data
from adapterhub.errors import ConfigError, OutputError
from adapterhub.files.atomic import replace_file
from adapterhub.methods._spec import parse_methods
from adapterhub.pages.run_files import lower_is_better
from adapterhub.tasks import Setting, parse_task
from adapterhub.training.defaults import run_options, steps_per_epoch
from adapterhub.training.kernels import KernelChoice, choose_kernels
from adapterhub.training.loading import BackboneLoader
from adapterhub.training.output_folder import writing
from adapterhub.training.prepare import max_positions
from adapterhub.training.recipe import Recipe
from adapterhub.training.starting_point import StartingPoint, starting_point

STUDY = "study.yaml"
RECORDS = "records"
WORK = "work"
CLAIMS = "claims"
POLL = 2.0  # seconds between two looks at what other processes have done


class CellEngine(Protocol):
    """Runs cells that do not depend on each other."""

    def run(self, cells: Iterable[tuple[Cell, bool]]) -> Iterator[CellRecord]:
        """Yield the record of each cell when it has ended; the flag is whether to measure.

        A cell is taken from `cells` only when it can begin at once.
        """


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


class LocalEngine:
    """Runs cells one after the other, in this process."""

    def __init__(
        self, contexts: dict[str, TaskContext], loader: BackboneLoader, work: Path
    ) -> None:
        self.contexts, self.loader, self.work = contexts, loader, work

    def run(self, cells: Iterable[tuple[Cell, bool]]) -> Iterator[CellRecord]:
        """Yield the record of each cell when it has ended."""
        for cell, measure in cells:
            yield run_cell(cell, self.contexts[cell.task], self.loader, self.work, measure=measure)


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
        setting = Setting(loaded.tokenizer, max_positions(loaded.model))
        encode_held(held, data.run.task.head, setting)
    fixed = replace(
        recipe,
        dtype=kernels.dtype or "fp32",
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
    model = meta_model(recipe.backbone, task=task.head, revision=recipe.revision)
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
    options = run_options(context.recipe.train, methods, rows)
    per_epoch = steps_per_epoch(rows, options.batch_size, options.gradient_accumulation)
    steps = options.epochs * per_epoch
    return Group(
        task, label, rows, min(study.bench.steps or steps, steps), methods[0].learning_rate
    )


class Scores:
    """The scores of the cells that are done, from the records in a folder."""

    def __init__(self, planned: PlannedStudy, folder: RecordFolder) -> None:
        self.planned, self.folder = planned, folder
        self.read: dict[str, CellRecord] = {}

    def record(self, cell: Cell) -> CellRecord | None:
        """Return the record of a cell, if it is done."""
        key = self.planned.key(cell)
        if key not in self.read and (record := self.folder.read(key)) is not None:
            self.read[key] = record
        return self.read.get(key)

    def __call__(self, cell: Cell) -> float | None:
        """Return what selects: larger is better, -inf for a cell without a score."""
        record = self.record(cell)
        if record is None:
            return None
        value = record.selected.get(record.metric)
        if record.status != "done" or value is None:
            return -math.inf
        return -value if lower_is_better(record.metric) else value


@dataclass(frozen=True)
class StudyState:
    """How far a study is: the choices that are made, and all its records, other programs' too."""

    choices: dict[Group, RateChoice]
    records: tuple[CellRecord, ...]


def run_study(
    planned: PlannedStudy,
    folder: RecordFolder,
    engine: CellEngine,
    done: Callable[[CellRecord, int], None] = lambda record, left: None,
    shard: Shard | None = None,
) -> StudyState:
    """Run every cell that has no record yet; other processes may run others in the same folder.

    Args:
        planned: the study.
        folder: its records.
        engine: runs the cells.
        done: called with each new record, and the number of cells that are known to be left.
        shard: which cells to run. Without it all of them; those that other processes run are then
            waited for.

    Raises:
        Stopped: a signal stopped the study; what is done is recorded.
    """
    with Claims(folder.folder.with_name(CLAIMS)) as claims:
        turn = _Turn(planned, folder, claims, shard or Shard())
        while cells := turn.left():
            new = 0
            for record in engine.run(turn.claimed(cells)):
                folder.write(record)
                claims.release(record.key)
                new += 1
                done(record, sum(turn.score.record(cell) is None for cell in cells))
            if not new and shard is not None:
                break
            if not new:
                time.sleep(POLL)
    return study_state(planned, folder)


@dataclass
class _Turn:
    """The cells that this process may run."""

    planned: PlannedStudy
    folder: RecordFolder
    claims: Claims
    shard: Shard

    def __post_init__(self) -> None:
        self.score = Scores(self.planned, self.folder)

    def left(self) -> list[Cell]:
        """Return the cells that can run now, in any process."""
        bench = self.planned.study.bench
        return next_cells(self.planned.groups, bench.rates, bench.seeds, self.score)[0]

    def claimed(self, cells: Iterable[Cell]) -> Iterator[tuple[Cell, bool]]:
        """Claim the cells one after the other, and yield those that no other process has."""
        for cell in cells:
            key = self.planned.key(cell)
            if not self.shard.has(key) or not self.claims.take(key):
                continue
            if self.score.record(cell) is None:
                yield cell, _measures(cell)
            else:
                self.claims.release(key)


def cells_left(planned: PlannedStudy, folder: RecordFolder) -> int:
    """Return the number of cells that can run now; none if the study is complete."""
    bench = planned.study.bench
    score = Scores(planned, folder)
    return len(next_cells(planned.groups, bench.rates, bench.seeds, score)[0])


def _measures(cell: Cell) -> bool:
    """Return whether a cell measures what the method costs at inference: once for a method."""
    return cell.stage == "final" and cell.seed == 1


def study_state(planned: PlannedStudy, folder: RecordFolder) -> StudyState:
    """Return what is done of a study."""
    score = Scores(planned, folder)
    bench = planned.study.bench
    _, choices = next_cells(planned.groups, bench.rates, bench.seeds, score)
    cells: list[Cell] = []
    for group, choice in choices.items():
        cells += choice.trials
        if choice.rate is not None:
            cells += [final_cell(group, choice.rate, n) for n in range(1, bench.seeds + 1)]
    records = (*_present(score.record(cell) for cell in cells), *_recorded(bench, folder))
    return StudyState(choices, records)


def _recorded(bench: BenchOptions, folder: RecordFolder) -> Iterator[CellRecord]:
    """Yield the records that other programs wrote; without such methods, no file is read."""
    every = folder.all() if bench.recorded else iter(())
    return (record for record in every if record.cell.method in bench.recorded)


def _present(records: Iterable[CellRecord | None]) -> Iterator[CellRecord]:
    return (record for record in records if record is not None)


def keep_study(study: Study, output: Path) -> Study:
    """Write `study.yaml` in the folder of a study, and return it.

    It names the recorded methods of both: of the study, and of the one that is there.

    Raises:
        OutputError: the folder has another study, or cannot be written.
        ConfigError: its study is broken.
    """
    path = output / STUDY
    if path.exists():
        there = read_study(path)
        if _identity(there, output) != _identity(study, output):
            raise OutputError(
                f"{output} has another study",
                expected="the same options as when it was begun",
                hint=f"adapterhub bench {path} --output {output} to continue it, "
                "or another --output",
            )
        study = _with_recorded(there, study)
    with writing(path):
        output.mkdir(parents=True, exist_ok=True)
        replace_file(path, study.to_yaml().encode())
    return study


def as_begun(study: Study, output: Path) -> Study:
    """Return a study with what was chosen when it was begun in a folder, if it is the same one.

    Args:
        study: the study as its user gave it.
        output: the folder.

    Raises:
        ConfigError: the study in the folder is broken.
    """
    path = output / STUDY
    if not path.exists():
        return study
    begun = read_study(path)
    begun = replace(begun, recipe=replace(begun.recipe, output=str(output)))
    recipe, bench = study.recipe, study.bench
    if recipe.dtype is None:
        recipe = replace(recipe, dtype=begun.recipe.dtype, attention=begun.recipe.attention)
    if bench.equal_time and not bench.equal_steps:
        bench = replace(bench, equal_steps=begun.bench.equal_steps)
    if bench.budget is not None and bench.steps is None:
        bench = replace(bench, steps=begun.bench.steps, select_rows=begun.bench.select_rows)
    chosen = replace(study, recipe=recipe, bench=bench)
    if _identity(chosen, output) != _identity(begun, output):
        return study
    recorded = _with_recorded(begun, study).bench.recorded
    return replace(begun, bench=replace(begun.bench, recorded=recorded))


def _with_recorded(begun: Study, study: Study) -> Study:
    """Return a study with the recorded methods of when it was begun as well."""
    names = dict.fromkeys((*begun.bench.recorded, *study.bench.recorded))
    return replace(study, bench=replace(study.bench, recorded=tuple(names)))


def _identity(study: Study, output: Path) -> str:
    """Return what a study in a folder runs: it may have been moved there from elsewhere."""
    recipe = replace(study.recipe, output=str(output))
    return Study(recipe, replace(study.bench, recorded=())).to_yaml()

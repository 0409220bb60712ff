"""Time the methods of a study in turns, in one process: what another one disturbs, it disturbs all.

In each round each method is attached, takes a few steps on real batches, and is detached. The
batches are the same for all methods, from short to long ones, and count by their median over the
rounds. The first steps compute all layers; where a run would replay the outputs of frozen ones,
further steps do.

Memory is what training adds to the loaded backbone: on a GPU by torch's own count, on Linux by the
peak of the process while it steps over what it had before, when free memory has been given back.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median

import torch

from adapterhub.bench.cells import Cell, Group
from adapterhub.bench.claims import Claims
from adapterhub.bench.execute import TaskContext, record_origin, reset_peak_memory
from adapterhub.bench.overhead import loading_seconds, pass_ratios, wait_for
from adapterhub.bench.timings import MethodTiming, TaskTimings, TimingFolder
from adapterhub.errors import AdapterhubError
from adapterhub.loop.batching import LazyBatches, batch_order
from adapterhub.loop.engine import Engine, model_loss, token_count
from adapterhub.loop.gradient_checkpointing import recompute
from adapterhub.loop.progress import peak_memory, process_memory
from adapterhub.loop.speedups import Speedups
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.recipe.defaults import run_options, steps_per_epoch
from adapterhub.speed.frozen_cache import frozen_layers
from adapterhub.status import Display, doing, showing
from adapterhub.training.kernels import KernelChoice
from adapterhub.training.loading import BackboneLoader
from adapterhub.training.prepare import PreparedRun, prepare

ROUNDS = 3
STEPS = 3  # timed in a round, and one before them that is not
PASSES = 3  # forward passes in a round; the first one does not count
ROWS = 1_000  # that the batches are chosen from, at most
_SEED = 1


def time_tasks(
    contexts: Mapping[str, TaskContext],
    groups: Sequence[Group],
    output: Path,
    loader: BackboneLoader,
    work: Path,
) -> None:
    """Time the methods of each task in turns, unless this device has done so, and write the times.

    Args:
        contexts: the tasks.
        groups: what was compared.
        output: the folder for the times.
        loader: loads the backbone.
        work: the folder for adapters that are loaded, and for claims.
    """
    folder = TimingFolder(output)
    for name, context in contexts.items():
        own = [group for group in groups if group.task == name]
        key = _key(context, own)
        with Claims(work) as claims:
            if can_be_timed(context) and not folder.path(key).exists() and claims.take(key):
                found = time_groups(context, own, loader, work)
                origin = record_origin(context)
                folder.write(TaskTimings(key, name, time.time(), origin, tuple(found)))


def can_be_timed(context: TaskContext) -> bool:
    """Return whether a few steps tell the time of many: not if a run makes its layers faster."""
    return not (context.recipe.train.compile or context.recipe.train.liger)


def seconds_in_turns(step: float) -> float:
    """Return about how long it takes to time a method whose step takes so many seconds."""
    return ROUNDS * (STEPS + 1 + PASSES) * step  # three passes are about a step


def _key(context: TaskContext, groups: Sequence[Group]) -> str:
    rows = sorted({group.rows for group in groups})
    return context.digest(record_origin(context)["device"], rows)


def time_groups(
    context: TaskContext, groups: Sequence[Group], loader: BackboneLoader, work: Path
) -> list[MethodTiming]:
    """Return the times of the methods of one task; those that fail have none.

    Numbers of rows with equal batches are timed once.

    Args:
        context: the task.
        groups: its methods, with numbers of training rows.
        loader: loads the backbone.
        work: the folder for adapters that are loaded.
    """
    timers: dict[tuple[str, int], _Timer] = {}
    for group in sorted(groups, key=lambda group: -group.rows):
        timers.setdefault(_place(context, group), _Timer(context, group, loader, work))
    with doing("timing methods in turns"), _quick_collections():
        for number in range(ROUNDS):
            for timer in timers.values():
                timer.turn(is_last=number == ROUNDS - 1)
    found = []
    for group in groups:
        timing = timers[_place(context, group)].timing()
        if timing is not None:
            accumulated = context.recipe.train.gradient_accumulation
            per_epoch = steps_per_epoch(group.rows, _batch_size(context, group), accumulated)
            found.append(replace(timing, method=group.method, rows=group.rows, per_epoch=per_epoch))
    return found


def _place(context: TaskContext, group: Group) -> tuple[str, int]:
    """Return what decides the time of a step: the method, however it is named, and the batches."""
    return str(context.methods(group.method)), _batch_size(context, group)


def _batch_size(context: TaskContext, group: Group) -> int:
    methods = context.parsed(group.method)
    return run_options(context.recipe.train, methods, group.rows).batch_size


@dataclass
class _Timer:
    """One method, and what was measured of it: by the number of the batch, or in each round."""

    context: TaskContext
    group: Group
    loader: BackboneLoader
    work: Path
    cold: dict[int, list[float]] = field(default_factory=dict)
    replayed: dict[int, list[float]] = field(default_factory=dict)
    added: list[int] = field(default_factory=list)
    ratios: list[dict[str, float]] = field(default_factory=list)
    tokens: float = 0.0
    load_seconds: float | None = None
    replays: bool = True  # until the first round shows that nothing is replayed
    failed: bool = False

    def turn(self, *, is_last: bool) -> None:
        """Measure once; a method that fails is left out from then on."""
        if self.failed:
            return
        before = _memory_now()
        try:
            with showing(Display()):  # each round would show the same stages again
                prepared = self._prepared()
        except AdapterhubError:
            self.failed = True
            return
        try:
            self._measure(prepared, before, is_last=is_last)
        except AdapterhubError:
            self.failed = True
        finally:
            self.loader.release(prepared.model)

    def _prepared(self) -> PreparedRun:
        """Return a run that would train on the batches that are timed, and only on those."""
        context, group = self.context, self.group
        cell = Cell(*group_place(group), 1, group.rate, _SEED, "search")
        recipe = context.recipe_of(cell, self.work)
        size = _batch_size(context, group)
        recipe = replace(recipe, train=replace(recipe.train, batch_size=size, max_steps=None))
        data = context.data.of(min(group.rows, ROWS), _SEED)
        kernels = KernelChoice(recipe.dtype, recipe.attention)
        prepared = prepare(recipe, data, kernels, self.loader)
        return _with_few_rows(prepared, STEPS * recipe.train.gradient_accumulation)

    def _measure(self, prepared: PreparedRun, before: int | None, *, is_last: bool) -> None:
        reset = _reset_peak(prepared.model.device)
        with _engine(prepared) as engine:
            self.tokens = self._steps(prepared, engine, self.cold)
            after = _peak(prepared.model.device) if reset else None
            if before is not None and after is not None:
                self.added.append(max(after - before, 0))
            if self.replays:
                self._measure_replay(prepared, engine)
        prepared.model.eval()
        self.ratios.append(pass_ratios(prepared.adapter, _middle_batch(prepared), PASSES))
        if is_last:
            saved = self.work / "timed"
            prepared.adapter.save(saved, overwrite=True)
            self.load_seconds = loading_seconds(prepared.adapter, saved)
            shutil.rmtree(saved, ignore_errors=True)

    def _measure_replay(self, prepared: PreparedRun, engine: Engine) -> None:
        few = replace(prepared, data=replace(prepared.data, evaluation=[]))
        frozen = frozen_layers(few.adapter, few.options, few.recorded, lambda line: None)
        with Speedups([frozen] if frozen else []) as speedups, showing(Display()):
            with engine.accelerator.autocast():
                speedups.enter(engine)
            self.replays = bool(speedups.used)
            if self.replays:
                self._steps(prepared, engine, self.replayed)

    def _steps(self, prepared: PreparedRun, engine: Engine, times: dict[int, list[float]]) -> float:
        """Time a step on each group of batches; return the mean of their tokens."""
        encoded, size = prepared.train, prepared.options.batch_size
        rows = range(len(encoded.rows))
        order = [list(rows[start : start + size]) for start in range(0, len(rows), size)]
        batches = LazyBatches(order, lambda indices: encoded.batch(indices))
        device, per_step = engine.device, engine.per_step
        windows = [range(n, min(n + per_step, len(order))) for n in range(0, len(order), per_step)]
        for number, window in [(-1, windows[0]), *enumerate(windows)]:
            wait_for(device)
            start = time.perf_counter()
            engine.step(batches, window)
            wait_for(device)
            if number >= 0:
                times.setdefault(number, []).append(time.perf_counter() - start)
        engine.unread.clear()
        return fmean(sum(token_count(batches[n]) for n in window) for window in windows)

    def timing(self) -> MethodTiming | None:
        """Return what was measured; None if the method failed."""
        if self.failed:
            return None
        return MethodTiming(
            self.group.method,
            self.group.rows,
            0,
            _mean(self.cold),
            self.tokens,
            _mean(self.replayed) if self.replayed else None,
            int(median(self.added)) if self.added else None,
            _median([each.get("attached") for each in self.ratios]),
            _median([each.get("routed") for each in self.ratios]),
            self.load_seconds,
        )


def group_place(group: Group) -> tuple[str, str, int]:
    """Return the task, the method and the rows of a group."""
    return group.task, group.method, group.rows


@contextlib.contextmanager
def _engine(prepared: PreparedRun) -> Iterator[Engine]:
    """Yield an engine that steps as the training loop does, with all stages of its method."""
    options, trainee = prepared.options, AdapterTrainee(prepared.adapter)
    loss = prepared.own_loss or model_loss
    with recompute(prepared.model, options.gradient_checkpointing) as layers:
        items = prepared.data.task.loss_items(prepared.train)
        engine = Engine(trainee, options, loss, items=items)
        engine.begin(1 << 20)
        trainee.train_mode(options.dropout)
        if layers is not None:
            layers.apply()
        yield engine


def _with_few_rows(prepared: PreparedRun, count: int) -> PreparedRun:
    """Return a run with the rows of some batches of the first epoch, from short to long ones."""
    encoded, options = prepared.train, prepared.options
    order = batch_order(encoded.lengths, options.batch_size, 0, _SEED, options.length_grouped)
    full = [indices for indices in order if len(indices) == options.batch_size] or order
    full.sort(key=lambda indices: max(encoded.lengths[index] for index in indices))
    count = min(count, len(full))
    chosen = [full[(2 * n + 1) * len(full) // (2 * count)] for n in range(count)]
    indices = [index for batch in chosen for index in batch]
    owners = tuple(range(len(indices))) if encoded.owners else ()
    few = replace(encoded, rows=[encoded.rows[index] for index in indices], owners=owners)
    return replace(prepared, rows=replace(prepared.rows, train=few))


def _middle_batch(prepared: PreparedRun) -> dict[str, torch.Tensor]:
    """Return the rows of middle length of those that are timed."""
    encoded, size = prepared.train, prepared.options.batch_size
    begin = (len(encoded.rows) - size) // 2
    batch = encoded.batch(range(max(begin, 0), max(begin, 0) + min(size, len(encoded.rows))))
    return {name: tensor.to(prepared.model.device) for name, tensor in batch.items()}


@contextlib.contextmanager
def _quick_collections() -> Iterator[None]:
    """Let the garbage collector look only at what is made inside."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _memory_now() -> int | None:
    """Return the memory that is in use, when what is free was given back; None if not known."""
    gc.collect()
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # not glibc
        return None
    return process_memory()


def _reset_peak(device: torch.device) -> bool:
    """Let the peak begin with what is in use now; return whether it does."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    reset_peak_memory()
    return abs(_peak(device) - process_memory()) < 1 << 24


def _peak(device: torch.device) -> int:
    return peak_memory(device)


def _mean(times: Mapping[int, Sequence[float]]) -> float:
    return fmean(median(each) for each in times.values())


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None

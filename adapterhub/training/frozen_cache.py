"""What is frozen is computed once: the outputs of frozen lower layers, kept over epochs and runs.

Before the first step, and when a stage begins, a pass with gradients shows which layers are below
everything that trains. They compute all rows once, in evaluation mode, sorted by length; from then
on their outputs are replayed. The stored values, in bf16, are used from the first step on, and
depend on the rows alone, not on batches: a resumed run records the same values again.

A plan is used only if the model's outputs are the same with it, for padded rows, from states that
were recorded without padding, with NaN in place of all outputs that are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.foundations import adapters_below
from adapterhub.errors import AdapterhubError
from adapterhub.hooks.composition import adapter_names
from adapterhub.hooks.replay import ReplayPlan, StackReplay, replayable
from adapterhub.hooks.reversible import is_reversible
from adapterhub.status import counting, doing
from adapterhub.tasks import Encoded
from adapterhub.tasks._losses import model_inputs
from adapterhub.tasks._rows import Row
from adapterhub.training.activation_files import DiskWriter, open_activations
from adapterhub.training.activation_folders import activation_entries, has_room
from adapterhub.training.activation_key import activation_key
from adapterhub.training.activation_store import (
    DTYPE,
    GB,
    MemoryWriter,
    RecordedStates,
    memory_limit,
)
from adapterhub.training.prepare import PreparedRun
from adapterhub.training.processes import process_count
from adapterhub.training.replay_check import (
    NotReplayable,
    Run,
    evaluating,
    find_plan,
    record_runs,
)

ROWS = 64  # of a pass that records, at most
TOKENS = {"cpu": 1024}  # of such a pass: what a processor's caches hold; elsewhere:
MOST_TOKENS = 8192
DISK_LIMIT = 8 * GB
OFF = "train.frozen_cache=off"


class NoCache:
    """All layers are computed at each step."""

    replaying = False
    """Whether frozen layers are replayed now."""

    def enter(self) -> None:
        """Find out what is frozen now. Called whenever other tensors train."""


@contextmanager
def frozen_cache(prepared: PreparedRun, note: Callable[[str], None]) -> Iterator[NoCache]:
    """Yield a cache to enter whenever other tensors train; inside, frozen layers are replayed.

    Passes in which other adapters apply compute all layers: only those of this run are recorded.

    Args:
        prepared: the run.
        note: gets a line for the user.
    """
    reason = _reason_against(prepared)
    if reason is not None:
        if prepared.options.frozen_cache not in (None, "off"):
            note(f"train.frozen_cache={prepared.options.frozen_cache} has no effect: {reason}")
        yield NoCache()
        return
    anatomy = prepared.adapter.anatomy
    with replayable(anatomy, next(iter(anatomy.stacks))) as replay:
        replay.applies = partial(_applies_alone, prepared.adapter)
        yield FrozenCache(prepared, replay, note)


def _applies_alone(adapter: Adapter) -> bool:
    """Return whether an adapter applies to all rows, with those below it and no other."""
    applied = {name for each in adapter.state.compositions for name in adapter_names(each)}
    return applied == {adapter.name, *(below.name for below in adapters_below(adapter))}


def _reason_against(prepared: PreparedRun) -> str | None:
    """Return why nothing is cached; None if something may be."""
    options, task = prepared.options, prepared.data.task
    reasons = {
        "it is off": options.frozen_cache == "off",
        "train.dropout=true changes what frozen layers return": options.dropout,
        "train.gradient_checkpointing=true computes layers again": options.gradient_checkpointing,
        "several processes train": process_count() > 1,
        "the text is streamed": prepared.data.streams,
        f"the rows of {task.name} change with each epoch": task.varies,
        f"the rows of {task.name} are decoded for each batch": task.decodes,
        "the backbone has no layers": not prepared.adapter.anatomy.stacks,
        "autograd does not see its reversible layers": is_reversible(prepared.adapter.anatomy),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


@dataclass
class _Rows:
    """The rows of training or evaluation, and what was recorded of them."""

    encoded: Encoded
    recorded: RecordedStates | None = None

    def tokens(self) -> int:
        return sum(map(_tokens, self.encoded.rows))

    def groups(self, tokens: int) -> Iterator[list[int]]:
        """Yield the indices of rows of similar length, with so many tokens at a time."""
        rows = self.encoded.rows
        lengths = [_tokens(row) for row in rows]
        group: list[int] = []
        # By tokens: the same rows in another order are recorded in the same passes.
        for index in sorted(range(len(rows)), key=lambda n: (lengths[n], rows[n]["input_ids"])):
            if group and (len(group) == ROWS or (len(group) + 1) * lengths[index] > tokens):
                yield group
                group = []
            group.append(index)
        if group:
            yield group


def _tokens(row: Row) -> int:
    """Count the tokens of a row, which may consist of rows: the choices of multiple choice."""
    lists = [value for value in row.values() if isinstance(value, list) and value]
    inner = [each for value in lists if isinstance(value[0], dict) for each in value]
    return sum(map(_tokens, inner)) if inner else len(row["input_ids"])


class FrozenCache(NoCache):
    """The recorded outputs of one run."""

    def __init__(
        self, prepared: PreparedRun, replay: StackReplay, note: Callable[[str], None]
    ) -> None:
        self.prepared, self.replay, self.note = prepared, replay, note
        self.model, self.options = prepared.model, prepared.options
        self.kept = prepared.activations
        self.staged = any(changed.stage for changed in prepared.adapter.changed)
        self.device = prepared.model.device
        self.rows = [_Rows(part) for part in prepared.train.parts] if self._sees_all_rows() else []
        self.rows += (
            [_Rows(each) for each in prepared.evaluation.parts] if prepared.evaluation else []
        )
        self.refused = False

    def _sees_all_rows(self) -> bool:
        options, rows = self.options, len(self.prepared.train.rows)
        examples = options.batch_size * options.gradient_accumulation
        return options.max_steps is None or options.max_steps * examples >= rows

    @property
    def replaying(self) -> bool:  # type: ignore[override]
        """Whether frozen layers are replayed now."""
        return self.replay.plan is not None

    def enter(self) -> None:
        """Find out what is frozen now, record it, and replay it from now on."""
        if self.refused or not self.rows:
            return self.replay.unwrap()
        self.replay.plan, self.replay.recorded = None, []
        self.replay.wrap()
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            plan = self._plan()
        if plan is not None:
            with evaluating(self.model):
                self._record(plan)
        if self.replay.plan is None:
            for each in self.rows:
                each.recorded = None  # frees the memory
        # The others compute as ever, also compiled.
        self.replay.unwrap(self.replay.plan.below if self.replay.plan else 0)

    def _plan(self) -> ReplayPlan | None:
        """Return what can be replayed; None if nothing is frozen, or replay changes outputs."""
        encoded = self.rows[0].encoded
        indices = _shortest_and_longest(encoded)
        singles = [self._run(encoded, [index]) for index in indices]
        autocast = torch.is_autocast_enabled(self.device.type)
        exact = self.model.dtype == torch.float32 and not autocast
        try:
            return find_plan(self.model, self.replay, self._run(encoded, indices), singles, exact)
        except NotReplayable as error:
            self._refuse(str(error))
            return None

    def _run(self, encoded: Encoded, indices: Sequence[int]) -> Run:
        """Return a function that runs the model on some rows."""

        def run() -> Any:
            batch = {name: t.to(self.device) for name, t in encoded.batch(indices).items()}
            return self.model(**model_inputs(batch))

        return run

    def _refuse(self, reason: str) -> None:
        self.refused = True
        self.note(f"frozen layers are computed at each step: {reason}")

    # Recording

    def _record(self, plan: ReplayPlan) -> None:
        """Record all rows that are not recorded yet, and begin to replay them."""
        layers = tuple(range(plan.below)) if self.staged else plan.layers
        new = [each for each in self.rows if not _has(each.recorded, plan.layers)]
        wheres = []
        try:
            for each in new:
                wheres.append(self._record_rows(each, plan, layers))
        except NotReplayable as error:
            return self._refuse(str(error))
        except AdapterhubError as error:
            return self._refuse(error.problem)
        self.replay.plan = plan
        self.replay.recorded = [each.recorded for each in self.rows if each.recorded]
        if new:
            self._say(plan, new, sorted(set(wheres)))

    def _say(self, plan: ReplayPlan, new: list[_Rows], wheres: list[str]) -> None:
        size = sum(each.recorded.states.nbytes for each in new if each.recorded)
        count = sum(len(each.encoded.rows) for each in new)
        layers = f"{plan.below} frozen layer{'s' * (plan.below > 1)}"
        self.note(
            f"{layers}: computed once for {count:,} rows, and kept in bf16, {size / 1e6:,.1f} MB "
            f"{' and '.join(wheres)}; {OFF} computes them at each step"
        )

    def _record_rows(self, rows: _Rows, plan: ReplayPlan, layers: tuple[int, ...]) -> str:
        """Record rows, or open what an earlier run recorded; return where they are kept.

        Raises:
            NotReplayable: they do not fit.
            OutputError: the disk cannot be written.
        """
        size = self._size(rows, plan, len(layers))
        in_memory = self._fits_in_memory(size)
        on_disk = self._looks_on_disk(in_memory)
        key = None
        if self.kept is not None or on_disk:
            key = activation_key(self.prepared, self.replay, plan.below, layers, rows.encoded)
        if key is not None and (where := self._open(rows, key, on_disk)):
            return where
        into = partial(record_runs, self.replay, self._runs(rows), plan, layers)
        with doing(f"computing {plan.below} frozen layers once"):
            if in_memory:
                recorded = into(MemoryWriter(rows.tokens()))
                rows.recorded = recorded
                if self.kept is not None and key is not None and recorded is not None:
                    self.kept.keep(key, recorded)
                return "in memory"
            if key is not None and has_room(size, self._limit(DISK_LIMIT)):
                with DiskWriter(key) as writer:
                    rows.recorded = into(writer)
                return "on disk"
        raise NotReplayable(
            f"their outputs take {size / GB:,.1f} GB; train.frozen_cache_gb sets the limit"
        )

    def _open(self, rows: _Rows, key: str, on_disk: bool) -> str | None:
        """Open what an earlier run recorded; return where it is, or None if there is nothing."""
        rows.recorded = None if self.kept is None else self.kept.get(key)
        if rows.recorded is not None:
            return "in memory, from an earlier run"
        rows.recorded = open_activations(key) if on_disk else None
        return None if rows.recorded is None else "on disk, from an earlier run"

    def _runs(self, rows: _Rows) -> Iterator[Run]:
        """Yield runs of the model on all rows, and show how many are done."""
        with counting(len(rows.encoded.rows), "recording") as done:
            for indices in rows.groups(TOKENS.get(self.device.type, MOST_TOKENS)):
                yield self._run(rows.encoded, indices)
                done(len(indices))

    def _size(self, rows: _Rows, plan: ReplayPlan, layers: int) -> int:
        """Return the bytes that rows take, in all stages: a resumed run must decide the same."""
        count = len(self.replay.layers) if self.staged else layers
        return rows.tokens() * count * plan.width * DTYPE.itemsize

    def _limit(self, default: int) -> int:
        gigabytes = self.options.frozen_cache_gb
        return default if gigabytes is None else int(gigabytes * GB)

    def _fits_in_memory(self, size: int) -> bool:
        kept = sum(r.recorded.states.nbytes for r in self.rows if r.recorded)
        return self.options.frozen_cache != "disk" and size + kept <= self._limit(memory_limit())

    def _looks_on_disk(self, in_memory: bool) -> bool:
        """Return whether states may be on disk: the key of those reads all frozen weights."""
        where = self.options.frozen_cache
        return where == "disk" or (where is None and (not in_memory or bool(activation_entries())))


def _has(recorded: RecordedStates | None, layers: tuple[int, ...]) -> bool:
    return recorded is not None and set(layers) <= set(recorded.layers)


def _shortest_and_longest(encoded: Encoded) -> list[int]:
    """Return the indices of a short, a middle and a long row, between which much is padded."""
    order = sorted(range(len(encoded.rows)), key=lambda index: _tokens(encoded.rows[index]))
    return sorted({order[0], order[len(order) // 2], order[-1]})

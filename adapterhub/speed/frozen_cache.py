"""What is frozen is computed once: the outputs of frozen lower layers, kept over epochs and runs.

Before the first step, and when a stage begins, a pass with gradients shows which layers are below
everything that trains. They compute all rows once, in evaluation mode, sorted by length; from then
on their outputs are replayed. The stored values, in bf16, are used from the first step on, and
depend on the rows alone, not on batches: a resumed run records the same values again.

A plan is used only if the model's outputs are the same with it, for padded rows, from states that
were recorded without padding. What is not recorded is NaN there, so that a module that reads it is
noticed even where it does not change an output yet.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.foundations import adapters_below
from adapterhub.anatomy.own_modules import PipelineParts, own_module
from adapterhub.backbones.newly_initialized import newly_initialized
from adapterhub.backbones.probe import evaluation_mode
from adapterhub.hooks.composition import adapter_names
from adapterhub.hooks.layer_output import is_reversible
from adapterhub.hooks.replay import (
    LayerCall,
    ReplayPlan,
    StackReplay,
    StackRows,
    plans_of_calls,
    replayable,
)
from adapterhub.hooks.slot import Slot
from adapterhub.loop.engine import Engine
from adapterhub.loop.processes import process_count
from adapterhub.loop.speedups import (
    NotUsed,
    Speedup,
    Undo,
    different_result,
    first_reason,
    tolerance,
)
from adapterhub.recipe.options import RunOptions
from adapterhub.speed.activation_store import (
    DTYPE,
    GB,
    KeptActivations,
    RecordedStates,
    StateRecorder,
    memory_limit,
)
from adapterhub.speed.frozen_encoders import FrozenEncoders
from adapterhub.status import counting, doing
from adapterhub.tasks import Encoded
from adapterhub.tasks._losses import model_inputs
from adapterhub.tasks._rows import Row

ROWS = 64  # of a pass that records, at most
TOKENS = {"cpu": 1024}  # of such a pass: what a processor's caches hold; elsewhere:
MOST_TOKENS = 8192
OFF = "train.frozen_cache=off"

Run = Callable[[], Any]
"""Runs the model on some rows, and returns its output."""


@dataclass(frozen=True)
class RecordedRun:
    """What of a run is recorded: its rows, unless the training rows are drawn of a stream.

    The seed of the run draws what the backbone lacks; `kept` is what runs on the same backbone have
    recorded.
    """

    train: Encoded
    evaluation: Encoded | None
    streamed: bool
    seed: int
    kept: KeptActivations


def frozen_layers(
    adapter: Adapter, options: RunOptions, recorded: RecordedRun, note: Callable[[str], None]
) -> Speedup | None:
    """Return what of a run may be computed once: frozen layers, or encoders of a pipeline."""
    if options.frozen_cache == "off":
        return None
    if reason := _reason_against(adapter, options, recorded):
        if options.frozen_cache is not None:
            note(f"train.frozen_cache={options.frozen_cache} has no effect: {reason}")
        return None
    if isinstance(parts := own_module(adapter.model), PipelineParts):
        return FrozenEncoders(parts, _limit(options), OFF)
    return FrozenLayers(adapter, options, recorded)


def _limit(options: RunOptions) -> int:
    """Return the most that is kept, in bytes."""
    gigabytes = options.frozen_cache_gb
    return memory_limit() if gigabytes is None else int(gigabytes * GB)


def _applies_alone(adapter: Adapter) -> bool:
    """Return whether an adapter applies to all rows, with those below it and no other."""
    applied = {name for each in adapter.state.compositions for name in adapter_names(each)}
    return applied == {adapter.name, *(below.name for below in adapters_below(adapter))}


def _reason_against(adapter: Adapter, options: RunOptions, recorded: RecordedRun) -> str | None:
    """Return why nothing is cached; None if something may be."""
    task = recorded.train.task
    reasons = {
        "train.dropout=true changes what frozen layers return": options.dropout,
        "several processes train": process_count() > 1,
    }
    if isinstance(own_module(adapter.model), PipelineParts):
        return first_reason(reasons)
    reasons |= {
        "train.gradient_checkpointing=true computes layers again": options.gradient_checkpointing,
        "the text is streamed": recorded.streamed,
        f"the rows of {task.name} change with each epoch": task.varies,
        f"the rows of {task.name} are decoded for each batch": task.decodes,
        "an adapter below changes tokens by their places": _below_at_places(adapter),
        "the backbone has no layers": not adapter.anatomy.stacks,
        "autograd does not see its reversible layers": is_reversible(adapter.anatomy),
    }
    return first_reason(reasons)


def _below_at_places(adapter: Adapter) -> bool:
    """Return whether frozen layers depend on labels, which show where prompts end."""
    below = (placed for each in adapters_below(adapter) for placed in each.placed)
    return any(placed.module.token_sets for placed in below)


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


class FrozenLayers(Speedup):
    """The frozen lower layers of one run, and what was recorded of them.

    Passes in which other adapters apply compute all layers: only those of this run are recorded.
    """

    refusal = "frozen layers are computed at each step"

    def __init__(self, adapter: Adapter, options: RunOptions, recorded: RecordedRun) -> None:
        self.adapter, self.model, self.options = adapter, adapter.model, options
        self.train, self.seed, self.kept = recorded.train, recorded.seed, recorded.kept
        self.staged = any(changed.stage for changed in adapter.changed)
        self.device = adapter.model.device
        self.rows = [_Rows(part) for part in recorded.train.parts] if self._sees_all_rows() else []
        self.rows += (
            [_Rows(each) for each in recorded.evaluation.parts] if recorded.evaluation else []
        )
        self.line = ""

    def _sees_all_rows(self) -> bool:
        options, rows = self.options, len(self.train.rows)
        examples = options.batch_size * options.gradient_accumulation
        return options.max_steps is None or options.max_steps * examples >= rows

    def patch(self, engine: Engine) -> Undo | None:
        """Find out what is frozen now, record it, and replay it from now on."""
        anatomy, self.line = self.adapter.anatomy, ""
        if not self.rows:
            return None
        with ExitStack() as stack:
            replay = stack.enter_context(replayable(anatomy, next(iter(anatomy.stacks))))
            replay.applies = partial(_applies_alone, self.adapter)
            devices = [self.device] if self.device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices):
                plan = self._plan(replay)
            if plan is None:
                for each in self.rows:
                    each.recorded = None  # frees the memory
                return None
            with evaluation_mode(self.model), torch.no_grad():
                self._record(replay, plan)
            replay.plan = plan
            replay.recorded = [each.recorded for each in self.rows if each.recorded]
            replay.unwrap(plan.below)  # the others compute as ever, also compiled
            return stack.pop_all().close
        return None

    def said(self) -> str:
        """Return what was recorded, if something was."""
        return self.line

    def _plan(self, replay: StackReplay) -> ReplayPlan | None:
        """Return what can be replayed; None if nothing is frozen."""
        encoded = self.rows[0].encoded
        indices = _shortest_and_longest(encoded)
        singles = [self._run(encoded, [index]) for index in indices]
        return find_plan(self.model, replay, self._run(encoded, indices), singles)

    def _run(self, encoded: Encoded, indices: Sequence[int]) -> Run:
        """Return a function that runs the model on some rows."""

        def run() -> Any:
            batch = {name: t.to(self.device) for name, t in encoded.batch(indices).items()}
            return self.model(**model_inputs(batch))

        return run

    # Recording

    def _record(self, replay: StackReplay, plan: ReplayPlan) -> None:
        """Record all rows that are not recorded yet."""
        layers = tuple(range(plan.below)) if self.staged else plan.layers
        new = [each for each in self.rows if not _has(each.recorded, plan.layers)]
        wheres = {self._record_rows(each, replay, plan, layers) for each in new}
        if new:
            self.line = _line(plan, new, sorted(wheres))

    def _record_rows(
        self, rows: _Rows, replay: StackReplay, plan: ReplayPlan, layers: tuple[int, ...]
    ) -> str:
        """Record rows, or take what an earlier run recorded; return where they are kept.

        Raises:
            NotUsed: they do not fit.
        """
        key = self._key(rows, replay, plan, layers)
        rows.recorded = None if key is None else self.kept.get(key)
        if rows.recorded is not None:
            return "in memory, from an earlier run"
        # In all stages: a resumed run must decide the same.
        count = len(replay.layers) if self.staged else len(layers)
        size = rows.tokens() * count * plan.width * DTYPE.itemsize
        if not self._fits(size):
            raise NotUsed(
                f"their outputs take {size / GB:,.1f} GB; train.frozen_cache_gb sets the limit"
            )
        with doing(f"computing {plan.below} frozen layers once"):
            recorder = StateRecorder(replay, layers, rows.tokens())
            rows.recorded = record_runs(recorder, self._runs(rows), plan)
        if key is not None and rows.recorded is not None:
            self.kept.keep(key, rows.encoded.rows, rows.recorded)
        return "in memory"

    def _key(
        self, rows: _Rows, replay: StackReplay, plan: ReplayPlan, layers: tuple[int, ...]
    ) -> Hashable:
        """Return what the outputs depend on beside the loaded backbone; None if on the adapter."""
        anatomy, autocast = self.adapter.anatomy, torch.is_autocast_enabled
        above = [
            path
            for name, paths in anatomy.layers.items()
            for number, path in enumerate(paths)
            if name != replay.name or number >= plan.below
        ]
        replaced = (*(f"{path}." for path in (*above, *anatomy.head())),)
        below = [m for n, m in self.model.named_modules() if not f"{n}.".startswith(replaced)]
        slots = [module for module in below if isinstance(module, Slot)]
        if self.staged or not all(p.requires_grad for slot in slots for p in slot.parameters()):
            return None
        drawn = any(not name.startswith(replaced) for name in newly_initialized(self.model))
        seed = self.seed if drawn else None
        dtype = autocast(self.device.type) and torch.get_autocast_dtype(self.device.type)
        return id(rows.encoded.rows), plan.below, layers, dtype, seed

    def _runs(self, rows: _Rows) -> Iterator[Run]:
        """Yield runs of the model on all rows, and show how many are done."""
        with counting(len(rows.encoded.rows), "recording") as done:
            for indices in rows.groups(TOKENS.get(self.device.type, MOST_TOKENS)):
                yield self._run(rows.encoded, indices)
                done(len(indices))

    def _fits(self, size: int) -> bool:
        kept = sum(r.recorded.states.nbytes for r in self.rows if r.recorded)
        return size + kept <= _limit(self.options)


def _line(plan: ReplayPlan, rows: list[_Rows], wheres: list[str]) -> str:
    """Describe what was recorded."""
    size = sum(each.recorded.states.nbytes for each in rows if each.recorded)
    count = sum(len(each.encoded.rows) for each in rows)
    layers = f"{plan.below} frozen layer{'s' * (plan.below > 1)}"
    return (
        f"{layers}: computed once for {count:,} rows, and kept in bf16, {size / 1e6:,.1f} MB "
        f"{' and '.join(wheres)}; {OFF} computes them at each step"
    )


def _has(recorded: RecordedStates | None, layers: tuple[int, ...]) -> bool:
    return recorded is not None and set(layers) <= set(recorded.layers)


def _shortest_and_longest(encoded: Encoded) -> list[int]:
    """Return the indices of a short, a middle and a long row, between which much is padded."""
    order = sorted(range(len(encoded.rows)), key=lambda index: _tokens(encoded.rows[index]))
    return sorted({order[0], order[len(order) // 2], order[-1]})


def find_plan(
    model: nn.Module, replay: StackReplay, run: Run, singles: Sequence[Run]
) -> ReplayPlan | None:
    """Return which layers are replayed, and which outputs that needs; None if no layer is frozen.

    `run` runs the model, in the mode in which it trains, on a padded batch, and `singles` on one
    row of it each.

    Raises:
        NotUsed: layers are frozen, and replaying them changes the outputs.
    """
    with torch.enable_grad():
        calls, _ = replay.watch(run)
    rows = replay.rows
    plans = [] if rows is None else plans_of_calls(calls, rows)
    if rows is None or not plans:
        return None
    check = _Check(replay, run, singles, tolerance(model))
    with evaluation_mode(model), torch.no_grad():
        for plan in plans:
            if check.changes_nothing(plan, calls, rows):
                return plan
    raise NotUsed("the model's outputs change where they are not computed")


class _Check:
    def __init__(
        self, replay: StackReplay, run: Run, singles: Sequence[Run], within: float
    ) -> None:
        self.replay, self.run, self.singles = replay, run, singles
        self.within = within

    def changes_nothing(self, plan: ReplayPlan, trained: list[LayerCall], rows: StackRows) -> bool:
        """Return whether outputs are the same with a plan.

        Raises:
            NotUsed: no plan is possible.
        """
        calls, expected = self.replay.watch(self.run)
        states = [self.replay.states(call) for call in (*calls[: plan.calls], *trained)]
        if any(state.shape[:2] != rows.mask.shape for state in states):
            return False
        evaluated, in_training = (states[n + plan.calls - 1][rows.mask] for n in (0, plan.calls))
        if different_result({"states": evaluated}, {"states": in_training}, self.within):
            raise NotUsed("dropout changes in training what they return")
        recorder = StateRecorder(self.replay, plan.layers, rows.mask.numel(), plan.dtype)
        recorded = record_runs(recorder, self.singles, plan)
        outputs = None if recorded is None else recorded.read(rows, plan.layers)
        if recorded is None or outputs is None:
            return False
        try:
            replayed = self.replay.try_out(self.run, plan, recorded)
        except (TypeError, ValueError, AttributeError, RuntimeError):
            return False  # a layer needs what others hand on
        computed = _tensors(expected, rows) | {"states": states[plan.calls - 1][rows.mask]}
        found = _tensors(replayed, rows) | {"states": outputs[plan.below - 1][rows.mask]}
        return all(
            different_result({name: tensor}, found, self.within) is None
            for name, tensor in computed.items()
        )


def record_runs(
    recorder: StateRecorder, runs: Iterable[Run], plan: ReplayPlan
) -> RecordedStates | None:
    """Compute the frozen layers for the rows of some runs; None if none has rows of tokens.

    Each run of the model, in evaluation mode, is ended behind the frozen layers.
    """
    replay = recorder.replay
    for run in runs:
        calls, _ = replay.watch(run, until=plan.calls)
        if replay.rows is not None:
            recorder.add(calls, replay.rows)
    return recorder.recorded() if recorder.places else None


def _tensors(output: Any, rows: StackRows) -> dict[str, Tensor]:
    """Return the tensors of a model's output, without the positions of padding."""
    return {
        name: value[rows.mask] if value.shape[:2] == rows.mask.shape else value
        for name, value in output.items()
        if isinstance(value, Tensor)
    }

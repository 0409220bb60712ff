"""Cache of frozen computations: outputs of frozen lower layers, kept over epochs and runs.

Before the first step, and when a stage begins, a pass with gradients finds the layers below
everything that trains. These layers compute all rows once, in evaluation mode, sorted by length;
from then on their outputs are replayed. The stored bf16 values are used from the first step on.
They depend on the rows alone, not on batches, so a resumed run records the same values again.

A plan is used only if it leaves the model's outputs unchanged for padded rows, using states that
were recorded without padding. Values that are not recorded are NaN during this check. A module that
reads them is detected even if it does not change an output yet.

Recorded rows are stored one after the other, without padding, in bf16. A batch is assembled by its
own mask, so rows may be padded on either side and to any length.

The forward functions of transformers are not copied. The layers are called as usual, with their
hooks, and their own forward is skipped while a call is replayed. Rows are identified by their
tokens, regardless of batch, order and padding side.

Frozen layers are found through autograd: a layer below everything that trains has an output that
does not require a gradient.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from adapterhub.adapters.activation import adapters_below
from adapterhub.adapters.adapter import Adapter
from adapterhub.anatomy.backbone import Backbone, PipelineParts
from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.probe import evaluation_mode
from adapterhub.hooks.composition import adapter_names
from adapterhub.hooks.layer_output import is_reversible
from adapterhub.hooks.slot import Slot
from adapterhub.loop.engine import Engine
from adapterhub.loop.processes import process_count
from adapterhub.loop.speedups import (
    NotUsed,
    Speedup,
    Undo,
    different_result,
    tolerance,
)
from adapterhub.patch import Patch
from adapterhub.recipe.recipe import RunOptions
from adapterhub.speed.frozen_encoders import FrozenEncoders
from adapterhub.status import counting, doing
from adapterhub.tasks import Encoded
from adapterhub.tasks.common.batches import Row, model_inputs

# Inputs besides the weights that may affect the states of a row; other tensors are not recorded.
ROW_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids"})
_MASK = "attention_mask"


class StackRows(NamedTuple):
    """The rows computed by one call of a stack.

    Attributes:
        keys: a digest of each row's tokens, without padding.
        mask: (batch, tokens), false at padding.
        options: the other arguments of the call.
    """

    keys: list[bytes]
    mask: Tensor
    options: Mapping[str, Any]


def stack_rows(inputs: Mapping[str, Any]) -> StackRows | None:
    """Return the rows of a call; None if its inputs are not only rows of tokens.

    `inputs` are the arguments of the embedding module, by name.
    """
    own = {name: value for name, value in inputs.items() if value is not None}
    tensors = {name: own.pop(name) for name in list(own) if isinstance(own[name], Tensor)}
    ids = tensors.get("input_ids")
    if ids is None or tensors.keys() - ROW_INPUTS:
        return None
    if ids.ndim != 2 or any(tensor.shape != ids.shape for tensor in tensors.values()):
        return None
    mask = tensors.pop(_MASK).bool() if _MASK in tensors else torch.ones_like(ids, dtype=torch.bool)
    valid = mask.cpu().numpy()
    if not _is_contiguous(valid):
        return None
    columns = [(name, tensors[name].cpu().numpy()) for name in sorted(tensors)]
    keys = [
        _key([(name, values[i][row]) for name, values in columns]) for i, row in enumerate(valid)
    ]
    return StackRows(keys, mask, own)


def _is_contiguous(valid: np.ndarray[Any, Any]) -> bool:
    """Return whether each row has tokens and no padding between them."""
    begins = valid[:, 0] + (valid[:, 1:] & ~valid[:, :-1]).sum(1)
    return bool((begins == 1).all())


def _key(columns: list[tuple[str, np.ndarray[Any, Any]]]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for name, values in columns:
        digest.update(f"{name} {values.dtype} ".encode() + values.tobytes())
    return digest.digest()


class LayerCall(NamedTuple):
    """One call of a layer: its number, its output, and the hidden states in that output."""

    number: int
    output: Any
    hidden: Tensor


class Recorded(Protocol):
    """The outputs of layers for some rows."""

    def read(self, rows: StackRows, layers: tuple[int, ...]) -> dict[int, Tensor] | None:
        """Return the outputs of some layers, (batch, tokens, d); None if a row is missing."""


class _Reached(Exception):
    """Ends a recorded call, since nothing above is needed."""


@dataclass
class _Watch:
    """Records the calls of the layers; ends the model's call after a given number of them."""

    until: int | None = None
    calls: list[LayerCall] = field(default_factory=list)

    def __call__(self, number: int, compute: Callable[[], Any]) -> Any:
        output = compute()
        hidden = output if isinstance(output, Tensor) else output[0]
        self.calls.append(LayerCall(number, output, hidden))
        if len(self.calls) == self.until:
            raise _Reached
        return output


@dataclass(frozen=True)
class ReplayPlan:
    """Layers that are skipped, and the values they return instead.

    Attributes:
        below: the layers below this one are replayed.
        calls: the number of calls; a shared layer is called several times.
        layers: those whose output is recorded: the last one of them, or all.
        form: the type in which a layer returns its hidden states and others, tuple or list; None if
            it returns a tensor.
        others: the values returned after the hidden states; None for tensors.
        computes_first: whether the first layer is computed, for tensors that it passes to other
            layers (relative positions).
        dtype: the dtype of the hidden states.
        width: the size of the hidden states, d.
        options: the other arguments of the calls that may be replayed.
    """

    below: int
    calls: int
    layers: tuple[int, ...]
    form: type | None
    others: tuple[Any, ...]
    computes_first: bool
    dtype: torch.dtype
    width: int
    options: Mapping[str, Any]


def plans_of_calls(calls: list[LayerCall], rows: StackRows) -> list[ReplayPlan]:
    """List the ways to replay all layers below everything that trains, the fastest first.

    The calls come from one pass over these rows with gradients.
    """
    frozen = calls[: _frozen_calls(calls)]
    below = len({call.number for call in frozen})
    forms = {_form_of(call.output) for call in frozen}
    if {call.number for call in frozen} != set(range(below)) or len(forms) != 1:
        return []
    (form,) = forms
    values = () if form is None else frozen[0].output[1:]
    others = tuple(None if isinstance(value, Tensor) else value for value in values)
    hands_on = any(isinstance(value, Tensor) for value in values)
    hidden = frozen[-1].hidden
    plan = ReplayPlan(below, len(frozen), (below - 1,), form, others, False, hidden.dtype,
                      hidden.shape[-1], rows.options)  # fmt: skip
    plans = [plan, replace(plan, computes_first=True)] if hands_on and below > 1 else [plan]
    return [*plans, *(replace(each, layers=tuple(range(below))) for each in plans)]


def _form_of(output: Any) -> type | None:
    return type(output) if isinstance(output, tuple | list) else None


def _frozen_calls(calls: list[LayerCall]) -> int:
    """Count the leading calls without a gradient whose layers are not called again later."""
    count = next((n for n, c in enumerate(calls) if c.hidden.requires_grad), len(calls))
    while True:
        later = {call.number for call in calls[count:]}
        again = next((n for n, call in enumerate(calls[:count]) if call.number in later), count)
        if again == count:
            return count
        count = again


class _Replay:
    """Returns the recorded outputs of one call."""

    def __init__(self, plan: ReplayPlan, outputs: Mapping[int, Tensor], unread: Tensor) -> None:
        self.plan, self.outputs, self.unread = plan, outputs, unread
        self.others = plan.others

    def __call__(self, number: int, compute: Callable[[], Any]) -> Any:
        if number >= self.plan.below:
            return compute()
        if number == 0 and self.plan.computes_first:
            self.others = tuple(compute()[1:])
        hidden = self.outputs.get(number, self.unread)
        return hidden if self.plan.form is None else self.plan.form((hidden, *self.others))


class StackReplay:
    """The layers of one stack of a model while they may be replayed (see `replayable`)."""

    def __init__(self, anatomy: Anatomy, stack: str) -> None:
        model = anatomy.model
        self.name = stack
        self.layers = [model.get_submodule(path) for path in anatomy.layers[stack]]
        self.root = model.get_submodule(anatomy.path(anatomy.stacks[stack].root))
        self.names = tuple(inspect.signature(self.root.forward).parameters)
        self.batch_dim = anatomy.family.batch_dim
        self.plan: ReplayPlan | None = None
        self.recorded: list[Recorded] = []
        self.applies: Callable[[], bool] = lambda: True  # whether a call may be replayed
        self.rows: StackRows | None = None
        self._watch: _Watch | None = None
        self._call: _Watch | _Replay | None = None
        self._poison = False
        self.patches = [Patch() for _ in self.layers]  # of the layers' forward functions

    def wrap(self) -> None:
        """Call `forward` instead of the forward of each layer."""
        for number, layer in enumerate(self.layers):
            wrapped = partial(self.forward, number, layer.forward)
            self.patches[number].override(layer, "forward", wrapped)

    def unwrap(self, first: int = 0) -> None:
        """Restore the forward of the layers from this number on."""
        for patch in reversed(self.patches[first:]):
            patch.undo()

    def watch(
        self, run: Callable[[], Any], until: int | None = None
    ) -> tuple[list[LayerCall], Any]:
        """Run the model without replay, and return the calls of the layers and the model's output.

        With `until`, the run ends after this many calls of layers, and the output is None.
        """
        self._watch = _Watch(until)
        try:
            output = run()
        except _Reached:
            output = None
        finally:
            watch, self._watch, self._call = self._watch, None, None
        return watch.calls, output

    def try_out(self, run: Callable[[], Any], plan: ReplayPlan, recorded: Recorded) -> Any:
        """Run the model with a plan; unrecorded outputs are NaN, to detect their readers."""
        before = self.plan, self.recorded
        self.plan, self.recorded, self._poison = plan, [recorded], True
        try:
            return run()
        finally:
            (self.plan, self.recorded), self._poison = before, False

    def states(self, call: LayerCall) -> Tensor:
        """Return the hidden states of a call as (batch, tokens, d)."""
        return call.hidden.transpose(0, 1) if self.batch_dim else call.hidden

    def forward(self, number: int, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute or replay a layer; replaces its forward."""
        call = self._call
        computed = partial(compute, *args, **kwargs)
        return computed() if call is None else call(number, computed)

    def begin(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Choose the mode of the layers for this call (pre-hook of the stack)."""
        self._call = self._watch
        replays = self.plan is not None and self.recorded and self.applies()
        if self._watch is None and not replays:
            return
        self.rows = stack_rows(dict(zip(self.names, args, strict=False)) | kwargs)
        if self._watch is None:
            self._call = self._replay(self.rows)

    def _replay(self, rows: StackRows | None) -> _Replay | None:
        if rows is None or self.plan is None or rows.options != self.plan.options:
            return None
        for recorded in self.recorded:
            outputs = recorded.read(rows, self.plan.layers)
            if outputs is not None:
                return self._replaying(self.plan, outputs)
        return None

    def _replaying(self, plan: ReplayPlan, outputs: Mapping[int, Tensor]) -> _Replay:
        typed = {number: output.to(plan.dtype) for number, output in outputs.items()}
        if self.batch_dim:
            typed = {number: output.transpose(0, 1) for number, output in typed.items()}
        last = typed[plan.below - 1]
        return _Replay(plan, typed, torch.full_like(last, torch.nan) if self._poison else last)

    def end(self, root: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Return the layers to normal computation (hook of the stack)."""
        self._call = None


@contextmanager
def replayable(anatomy: Anatomy, stack: str) -> Iterator[StackReplay]:
    """Make the layers of a stack replayable inside the context; restore them afterwards."""
    replay = StackReplay(anatomy, stack)
    with Patch() as patch:
        patch.push(replay.unwrap)
        replay.wrap()
        patch.hook(replay.root.register_forward_pre_hook, replay.begin, with_kwargs=True)
        patch.hook(replay.root.register_forward_hook, replay.end, always_call=True)
        yield replay


DTYPE = torch.bfloat16
GB = 10**9
Places: TypeAlias = dict[bytes, tuple[int, int]]
"""The first token and the number of tokens of each row, by key."""


@dataclass
class RecordedStates:
    """The outputs of some layers for some rows.

    Attributes:
        layers: the numbers of the layers.
        states: (tokens of all rows, layers, d).
        places: the first token and the number of tokens of each row, by its key.
    """

    layers: tuple[int, ...]
    states: Tensor
    places: Places = field(repr=False)

    def read(self, rows: StackRows, layers: tuple[int, ...]) -> dict[int, Tensor] | None:
        """Return the outputs of some layers, (batch, tokens, d); None if a row is missing."""
        places = [self.places.get(key) for key in rows.keys]
        recorded = [place for place in places if place is not None]
        if len(recorded) < len(places) or not set(layers) <= set(self.layers):
            return None
        return {
            layer: self._batch(self.layers.index(layer), recorded, rows.mask) for layer in layers
        }

    def _batch(self, column: int, places: list[tuple[int, int]], mask: Tensor) -> Tensor:
        states = self.states[:, column]
        values = torch.cat([states[start : start + count] for start, count in places])
        values = values.to(mask.device)
        batch = values.new_zeros(*mask.shape, values.shape[-1])
        batch[mask] = values
        return batch


class StateRecorder:
    """Records the outputs of a stack's layers for the rows that the model computes."""

    def __init__(
        self,
        replay: StackReplay,
        layers: tuple[int, ...],
        tokens: int,
        dtype: torch.dtype = DTYPE,
    ) -> None:
        self.replay, self.layers = replay, layers
        self.expected, self.dtype = tokens, dtype
        self.states: Tensor | None = None
        self.places: Places = {}
        self.tokens = 0

    def add(self, calls: Iterable[LayerCall], rows: StackRows) -> None:
        """Add the rows of one call; skip rows that are already recorded."""
        outputs = {c.number: c for c in calls}  # for a shared layer, the last call
        states = torch.stack([self.replay.states(outputs[n]) for n in self.layers], 2)
        kept, before = torch.zeros_like(rows.mask), self.tokens
        for row, key in enumerate(rows.keys):
            if key not in self.places:
                count = int(rows.mask[row].sum())
                self.places[key] = self.tokens, count
                self.tokens += count
                kept[row] = rows.mask[row]
        self._write(before, states.detach()[kept].cpu())

    def _write(self, start: int, states: Tensor) -> None:
        """Store the states of more tokens: (tokens, layers, d)."""
        if self.states is None:
            self.states = torch.empty(self.expected, *states.shape[1:], dtype=self.dtype)
        if (lacking := self.tokens - len(self.states)) > 0:
            more = self.states.new_empty(lacking + start, *states.shape[1:])
            self.states = torch.cat([self.states, more])
        self.states[start : self.tokens] = states

    def recorded(self) -> RecordedStates:
        """Return the recorded states."""
        assert self.states is not None
        return RecordedStates(self.layers, self.states[: self.tokens], self.places)


class KeptActivations:
    """Recorded outputs of the latest runs on one loaded backbone, within a memory limit."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = memory_limit() if limit is None else limit
        # Stored with the rows: a key contains their address, which is valid while they exist.
        self.states: dict[Hashable, tuple[Sequence[Row], RecordedStates]] = {}

    def get(self, key: Hashable) -> RecordedStates | None:
        """Return the outputs with a key, if they are kept."""
        return self.states[key][1] if key in self.states else None

    def keep(self, key: Hashable, rows: Sequence[Row], recorded: RecordedStates) -> None:
        """Store outputs; evict the oldest ones if space is short."""
        self.states[key] = rows, recorded
        while sum(each.states.nbytes for _, each in self.states.values()) > self.limit:
            del self.states[next(iter(self.states))]


def memory_limit() -> int:
    """Return a quarter of the memory that this process may use, in bytes."""
    try:
        most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        most = 8 * GB
    with contextlib.suppress(OSError, ValueError):  # in a container
        most = min(most, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return most // 4


ROWS = 64  # of a recording pass, at most
TOKENS = {"cpu": 1024}  # of such a pass: fits a processor's caches; elsewhere:
MOST_TOKENS = 8192
OFF = "train.frozen_cache=off"

Run = Callable[[], Any]
"""Run the model on some rows, and return its output."""


@dataclass(frozen=True)
class RecordedRun:
    """Inputs for recording a run: its rows, unless the training rows come from a stream.

    The seed of the run initializes weights that the backbone lacks; `kept` holds the recordings of
    runs on the same backbone.
    """

    train: Encoded
    evaluation: Encoded | None
    streamed: bool
    seed: int
    kept: KeptActivations


def frozen_layers(
    adapter: Adapter, options: RunOptions, recorded: RecordedRun, note: Callable[[str], None]
) -> Speedup | None:
    """Return the computations of a run to cache: frozen layers, or encoders of a pipeline."""
    if options.frozen_cache == "off":
        return None
    if reason := _reason_against(adapter, options, recorded):
        if options.frozen_cache is not None:
            note(f"train.frozen_cache={options.frozen_cache} has no effect: {reason}")
        return None
    if isinstance(parts := adapter.backbone.module, PipelineParts):
        return FrozenEncoders(parts, _limit(options), OFF)
    return FrozenLayers(adapter, options, recorded)


def _limit(options: RunOptions) -> int:
    """Return the limit of the cache, in bytes."""
    gigabytes = options.frozen_cache_gb
    return memory_limit() if gigabytes is None else int(gigabytes * GB)


def _applies_alone(adapter: Adapter) -> bool:
    """Return whether an adapter applies to all rows, alone or with the adapters below it."""
    applied = {name for each in adapter.state.compositions for name in adapter_names(each)}
    return applied == {adapter.name, *(below.name for below in adapters_below(adapter))}


def _reason_against(adapter: Adapter, options: RunOptions, recorded: RecordedRun) -> str | None:
    """Return the reason why nothing is cached; None if caching is possible."""
    task = recorded.train.task
    reasons = {
        "train.dropout=true changes what frozen layers return": options.dropout,
        "train.neftune_alpha changes their inputs": options.neftune_alpha is not None,
        "several processes train": process_count() > 1,
    }
    if not isinstance(adapter.backbone.module, PipelineParts):
        reasons |= {
            "train.gradient_checkpointing=true computes layers again": (
                options.gradient_checkpointing
            ),
            "the text is streamed": recorded.streamed,
            f"the rows of {task.name} change with each epoch": task.varies,
            f"the rows of {task.name} are decoded for each batch": task.decodes,
            "an adapter below changes tokens by their places": _below_at_places(adapter),
            "the backbone has no layers": not adapter.anatomy.stacks,
            "autograd does not see its reversible layers": is_reversible(adapter.anatomy),
        }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _below_at_places(adapter: Adapter) -> bool:
    """Return whether frozen layers depend on labels, which mark the ends of prompts."""
    below = (placed for each in adapters_below(adapter) for placed in each.placed)
    return any(placed.module.token_sets for placed in below)


@dataclass
class _Rows:
    """The rows of training or evaluation, and their recorded outputs."""

    encoded: Encoded
    recorded: RecordedStates | None = None

    def tokens(self) -> int:
        return sum(map(_tokens, self.encoded.rows))

    def groups(self, tokens: int) -> Iterator[list[int]]:
        """Yield the indices of rows of similar length, up to a number of tokens at a time."""
        rows = self.encoded.rows
        lengths = [_tokens(row) for row in rows]
        group: list[int] = []
        # Sorted by tokens, so that the same rows in another order are recorded in the same passes.
        for index in sorted(range(len(rows)), key=lambda n: (lengths[n], rows[n]["input_ids"])):
            if group and (len(group) == ROWS or (len(group) + 1) * lengths[index] > tokens):
                yield group
                group = []
            group.append(index)
        if group:
            yield group


def _tokens(row: Row) -> int:
    """Count the tokens of a row; a row of multiple choice consists of one row per choice."""
    lists = [value for value in row.values() if isinstance(value, list) and value]
    inner = [each for value in lists if isinstance(value[0], dict) for each in value]
    return sum(map(_tokens, inner)) if inner else len(row["input_ids"])


class FrozenLayers(Speedup):
    """The frozen lower layers of one run, and their recorded outputs.

    Passes with other adapters compute all layers: only passes of this run are recorded.
    """

    refusal = "frozen layers are computed at each step"

    def __init__(self, adapter: Adapter, options: RunOptions, recorded: RecordedRun) -> None:
        self.adapter, self.model, self.options = adapter, adapter.model, options
        self.train, self.seed, self.kept = recorded.train, recorded.seed, recorded.kept
        self.staged = any(changed.stage for changed in adapter.changed)
        self.device = adapter.backbone.pretrained.device
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
        """Find the frozen layers, record their outputs, and replay them from now on."""
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
            replay.unwrap(plan.below)  # the other layers compute as usual, possibly compiled
            return stack.pop_all().close
        return None

    def said(self) -> str:
        """Report the recorded outputs, if any."""
        return self.line

    def _plan(self, replay: StackReplay) -> ReplayPlan | None:
        """Return a replay plan; None if no layer is frozen."""
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
        """Record all rows that have not been recorded yet."""
        layers = tuple(range(plan.below)) if self.staged else plan.layers
        new = [each for each in self.rows if not _has(each.recorded, plan.layers)]
        wheres = {self._record_rows(each, replay, plan, layers) for each in new}
        if new:
            self.line = _line(plan, new, sorted(wheres))

    def _record_rows(
        self, rows: _Rows, replay: StackReplay, plan: ReplayPlan, layers: tuple[int, ...]
    ) -> str:
        """Record rows, or reuse those of an earlier run; return where they are stored.

        Raises:
            NotUsed: they do not fit.
        """
        key = self._key(rows, replay, plan, layers)
        rows.recorded = None if key is None else self.kept.get(key)
        if rows.recorded is not None:
            return "in memory, from an earlier run"
        # Counted for all stages, so that a resumed run decides the same.
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
        """Return the outputs' key on the loaded backbone; None if they depend on the adapter."""
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
        drawn = any(not name.startswith(replaced) for name in Backbone.of(self.model).fresh)
        seed = self.seed if drawn else None
        dtype = autocast(self.device.type) and torch.get_autocast_dtype(self.device.type)
        return id(rows.encoded.rows), plan.below, layers, dtype, seed

    def _runs(self, rows: _Rows) -> Iterator[Run]:
        """Yield runs of the model on all rows, and show progress."""
        with counting(len(rows.encoded.rows), "recording") as done:
            for indices in rows.groups(TOKENS.get(self.device.type, MOST_TOKENS)):
                yield self._run(rows.encoded, indices)
                done(len(indices))

    def _fits(self, size: int) -> bool:
        kept = sum(r.recorded.states.nbytes for r in self.rows if r.recorded)
        return size + kept <= _limit(self.options)


def _line(plan: ReplayPlan, rows: list[_Rows], wheres: list[str]) -> str:
    """Describe the recorded outputs."""
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
    """Return the indices of a short, a middle and a long row, to get much padding between them."""
    order = sorted(range(len(encoded.rows)), key=lambda index: _tokens(encoded.rows[index]))
    return sorted({order[0], order[len(order) // 2], order[-1]})


def find_plan(
    model: nn.Module, replay: StackReplay, run: Run, singles: Sequence[Run]
) -> ReplayPlan | None:
    """Return the layers to replay, and the outputs to record; None if no layer is frozen.

    `run` runs the model in training mode on a padded batch; `singles` run it on one row each.

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
        """Return whether a plan leaves the outputs unchanged.

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
            return False  # a layer needs tensors passed on by others
        computed = _tensors(expected, rows) | {"states": states[plan.calls - 1][rows.mask]}
        actual = _tensors(replayed, rows) | {"states": outputs[plan.below - 1][rows.mask]}
        return all(
            different_result({name: tensor}, actual, self.within) is None
            for name, tensor in computed.items()
        )


def record_runs(
    recorder: StateRecorder, runs: Iterable[Run], plan: ReplayPlan
) -> RecordedStates | None:
    """Compute the frozen layers for the rows of some runs; return None without rows of tokens.

    Each run of the model, in evaluation mode, ends after the frozen layers.
    """
    replay = recorder.replay
    for run in runs:
        calls, _ = replay.watch(run, until=plan.calls)
        if replay.rows is not None:
            recorder.add(calls, replay.rows)
    return recorder.recorded() if recorder.places else None


def _tensors(output: Any, rows: StackRows) -> dict[str, Tensor]:
    """Return the tensors of a model's output, without padding positions."""
    return {
        name: value[rows.mask] if value.shape[:2] == rows.mask.shape else value
        for name, value in output.items()
        if isinstance(value, Tensor)
    }

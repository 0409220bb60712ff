"""The lower layers of a stack return outputs that were recorded before, instead of computing them.

No forward of transformers is copied: the layers are called as ever, with their hooks, and while a
call is replayed their own forward is skipped. Rows are recognized by their tokens, so that it does
not matter which batch they are in, in which order, and on which side they are padded.

Which layers are frozen is read from autograd: a layer below everything that trains has an output
that requires no gradient.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy
from adapterhub.patch import Patch

# What the states of a row may depend on besides the weights; other tensors are not recorded.
ROW_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids"})
_MASK = "attention_mask"


class StackRows(NamedTuple):
    """The rows that one call of a stack computes.

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

    `inputs` are the arguments of the module that embeds the tokens, by name.
    """
    given = {name: value for name, value in inputs.items() if value is not None}
    tensors = {name: given.pop(name) for name in list(given) if isinstance(given[name], Tensor)}
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
    return StackRows(keys, mask, given)


def _is_contiguous(valid: np.ndarray[Any, Any]) -> bool:
    """Return whether each row has tokens, without padding between them."""
    begins = valid[:, 0] + (valid[:, 1:] & ~valid[:, :-1]).sum(1)
    return bool((begins == 1).all())


def _key(columns: list[tuple[str, np.ndarray[Any, Any]]]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for name, values in columns:
        digest.update(f"{name} {values.dtype} ".encode() + values.tobytes())
    return digest.digest()


class LayerCall(NamedTuple):
    """One call of a layer: its number, its output, and the hidden states among that."""

    number: int
    output: Any
    hidden: Tensor


class Recorded(Protocol):
    """The outputs of layers for some rows."""

    def read(self, rows: StackRows, layers: tuple[int, ...]) -> dict[int, Tensor] | None:
        """Return the outputs of some layers, (batch, tokens, d); None if a row is missing."""


class _Reached(Exception):
    """A recorded call ends here: nothing above is needed."""


@dataclass
class _Watch:
    """Notes the calls of the layers; ends the call of the model after so many of them, if given."""

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
    """Which layers are not computed, and what they return.

    Attributes:
        below: the layers below this one are replayed.
        calls: how often they are called; a shared layer is called several times.
        layers: those whose output is recorded: the last one of them, or all.
        form: the type in which a layer returns its hidden states and others: tuple or list; None:
            it returns a tensor.
        others: what it returns behind the hidden states; None for tensors.
        computes_first: whether the first layer is computed, for the tensors that it hands on to
            others (relative positions).
        dtype: the dtype of the hidden states.
        width: their size, d.
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

    The calls are those of one pass with gradients, of these rows.
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
    """Count the first calls without a gradient, of layers that are not called again after them."""
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
    """The layers of one stack of a model, while they may be replayed: see `replayable`."""

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
        self.patches = [Patch() for _ in self.layers]  # of their forwards

    def wrap(self) -> None:
        """Call `forward` in place of the forward of each layer."""
        for number, layer in enumerate(self.layers):
            wrapped = partial(self.forward, number, layer.forward)
            self.patches[number].override(layer, "forward", wrapped)

    def unwrap(self, first: int = 0) -> None:
        """Restore the forward of the layers from a number on."""
        for patch in reversed(self.patches[first:]):
            patch.undo()

    def watch(
        self, run: Callable[[], Any], until: int | None = None
    ) -> tuple[list[LayerCall], Any]:
        """Run the model without replay, and return the calls of the layers and the model's output.

        `until` ends it after so many calls of layers; the output is then None.
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
        """Run the model with a plan; outputs not recorded are NaN, to see who reads them."""
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
        """Compute a layer or replay it: in place of its forward."""
        call = self._call
        computed = partial(compute, *args, **kwargs)
        return computed() if call is None else call(number, computed)

    def begin(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Choose what the layers do in this call: a pre-hook of the stack."""
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
        """Let the layers compute again: a hook of the stack."""
        self._call = None


@contextmanager
def replayable(anatomy: Anatomy, stack: str) -> Iterator[StackReplay]:
    """Let the layers of a stack be replayed inside; afterwards they are as before."""
    replay = StackReplay(anatomy, stack)
    with Patch() as patch:
        patch.push(replay.unwrap)
        replay.wrap()
        patch.hook(replay.root.register_forward_pre_hook, replay.begin, with_kwargs=True)
        patch.hook(replay.root.register_forward_hook, replay.end, always_call=True)
        yield replay

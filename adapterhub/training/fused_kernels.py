"""Fused kernels of Liger (`train.liger`): one for each norm, gated layer and rotation of positions.

A norm, the product of a gate, or the rotation of queries and keys takes several operations, each of
which reads and writes the whole batch; Liger computes each of them by one Triton kernel, and keeps
less for the backward pass. The modules stay, and so do the hooks of adapters on them. Its loss is
left out: `head_loss` computes it where the head is frozen.

Some of its backward passes write over what the forward pass has kept. An adapter that has kept the
same tensor would get a wrong gradient, which autograd does not notice. So before the first step,
and when a stage begins, loss, gradients and outputs of one batch are computed both ways; where they
differ, or where a kernel cannot be run, none is used and one line says why.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from adapterhub.adapters.adapter import Adapter
from adapterhub.errors import ConfigError
from adapterhub.training.both_ways import BothWays, TriedBatch
from adapterhub.training.options import RunOptions, TrainOptions
from adapterhub.training.processes import process_count

OFF = "train.liger=false"
_WITHOUT_LOSS = {"cross_entropy": False, "fused_linear_cross_entropy": False}
_ABSENT = object()


def check_installed(options: TrainOptions) -> None:
    """Check that Liger can be imported, if it is to be used.

    Args:
        options: the training options.

    Raises:
        ConfigError: it is not installed.
    """
    if options.liger and importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError(
            "train.liger=true needs liger-kernel, which is not installed",
            hint=f'pip install "adapterhub[liger]", or {OFF}',
        )


@contextmanager
def fused_kernels(
    adapter: Adapter,
    options: RunOptions,
    batches: Callable[[], TriedBatch],
    note: Callable[[str], None],
    entered: Callable[[], None],
) -> Iterator[Callable[[], None]]:
    """Yield a function to call whenever other tensors train; inside, Liger's kernels may be used.

    Args:
        adapter: the adapter that trains.
        options: the training options.
        batches: returns the batches that are computed both ways.
        note: gets a line for the user.
        entered: called by that function first, while no kernel is used.
    """
    reason = _reason_against(adapter, options)
    if reason is not None:
        if options.liger:
            note(f"train.liger=true has no effect: {reason}")
        yield entered
        return
    kernels = FusedKernels(adapter, batches(), note)
    try:
        yield partial(kernels.enter, entered)
    finally:
        kernels.undo()


def _reason_against(adapter: Adapter, options: RunOptions) -> str | None:
    """Return why no kernel is used; None if they may be."""
    reasons = {
        "it is off": not options.liger,
        "several processes train": process_count() > 1,
        "the head changes between steps": bool(adapter.heads),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


class FusedKernels:
    """The kernels in the model of a run, where they change nothing."""

    def __init__(self, adapter: Adapter, tried: TriedBatch, note: Callable[[str], None]) -> None:
        self.liger, self.model_type = Liger(adapter.model), adapter.model.config.model_type
        self.both_ways, self.note = BothWays(adapter, tried), note
        self.refused = False

    def enter(self, entered: Callable[[], None]) -> None:
        """Use the kernels, if that changes nothing.

        Args:
            entered: called first, while none is used.
        """
        self.undo()
        entered()
        if self.refused:
            return
        reason = self.both_ways.difference(self.undo, self.liger.use)
        count = self.liger.count()
        if reason is None and not count:
            reason = f"it has none for {self.model_type}"
        if reason is not None:
            self.undo()
            self.refused = True
            self.note(f"Liger's kernels are not used: {reason}")
        else:
            self.note(f"{count} modules compute by Liger's kernels; {OFF} for their own")

    def undo(self) -> None:
        """Let the model compute as ever."""
        self.liger.undo()


class Liger:
    """Liger's changes of one model, from `use` until `undo`.

    Until then, other models of the same class rotate positions by its kernel, too.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.changed: list[tuple[Any, str, Any]] = []

    def use(self) -> None:
        """Let Liger change the model, and note what it changes."""
        from transformers.integrations.liger import apply_liger_kernel

        before = [(owner, dict(vars(owner))) for owner in _changeable(self.model)]
        try:
            apply_liger_kernel(self.model, _WITHOUT_LOSS)
        finally:
            for owner, old in before:
                now = vars(owner)
                self.changed += [
                    (owner, name, old.get(name, _ABSENT))
                    for name in {*old, *now}
                    if old.get(name, _ABSENT) is not now.get(name, _ABSENT)
                ]

    def count(self) -> int:
        """Return how many modules are changed."""
        return len({id(owner) for owner, _, _ in self.changed if isinstance(owner, nn.Module)})

    def undo(self) -> None:
        """Restore what was changed."""
        for owner, name, value in reversed(self.changed):
            if value is _ABSENT:
                _remove(owner, name)
            else:
                _set(owner, name, value)
        self.changed = []


def _changeable(model: nn.Module) -> list[Any]:
    """Return a model's modules, their classes in transformers and the files that define these."""
    modules = list(model.modules())
    classes = {
        base
        for module in modules
        for base in type(module).__mro__
        if base.__module__.startswith("transformers.models.")
    }
    files = {base.__module__ for base in classes}
    return [*modules, *classes, *(sys.modules[name] for name in files)]


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute; that of a module without the checks of torch."""
    if isinstance(owner, nn.Module):
        vars(owner)[name] = value
    else:
        setattr(owner, name, value)


def _remove(owner: Any, name: str) -> None:
    if isinstance(owner, nn.Module):
        vars(owner).pop(name, None)
    else:
        delattr(owner, name)

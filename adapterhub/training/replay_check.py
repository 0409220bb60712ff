"""Which layers can be replayed: found by autograd, and tried on a padded batch before it is used.

The outputs of the frozen layers are recorded row by row, without padding, and replayed for the
padded batch. The model's outputs must be those that it computes. What is not recorded is NaN there,
so that a module that reads it is noticed even where it does not change an output yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from adapterhub.hooks.replay import LayerCall, ReplayPlan, StackReplay, StackRows, plans_of_calls
from adapterhub.training.activation_store import (
    MemoryWriter,
    RecordedStates,
    StateRecorder,
    StateWriter,
)

Run = Callable[[], Any]
"""Runs the model on some rows, and returns its output."""


class NotReplayable(Exception):
    """Layers are frozen, but the model's outputs are not the same where they are replayed."""


def find_plan(
    model: nn.Module, replay: StackReplay, run: Run, singles: Sequence[Run], exact: bool
) -> ReplayPlan | None:
    """Return which layers are replayed, and which outputs that needs; None if no layer is frozen.

    Args:
        model: the model, in the mode in which it trains.
        replay: its stack.
        run: runs it on a padded batch.
        singles: run it on one row of the batch each.
        exact: whether it computes in fp32.

    Raises:
        NotReplayable: layers are frozen, and replaying them changes the outputs.
    """
    with torch.enable_grad():
        calls, _ = replay.watch(run)
    rows = replay.rows
    plans = [] if rows is None else plans_of_calls(calls, rows)
    if rows is None or not plans:
        return None
    check = _Check(replay, run, singles, 1e-3 if exact else 0.05)
    with evaluating(model):
        for plan in plans:
            if check.changes_nothing(plan, calls, rows):
                return plan
    raise NotReplayable("the model's outputs change where they are not computed")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode inside, without gradients; each module's mode is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


class _Check:
    def __init__(
        self, replay: StackReplay, run: Run, singles: Sequence[Run], tolerance: float
    ) -> None:
        self.replay, self.run, self.singles = replay, run, singles
        self.tolerance = tolerance

    def changes_nothing(self, plan: ReplayPlan, trained: list[LayerCall], rows: StackRows) -> bool:
        """Return whether outputs are the same with a plan.

        Args:
            plan: the plan.
            trained: the calls of the layers in training mode.
            rows: the rows of the batch.

        Raises:
            NotReplayable: no plan is possible.
        """
        calls, expected = self.replay.watch(self.run)
        states = [self.replay.states(call) for call in (*calls[: plan.calls], *trained)]
        if any(state.shape[:2] != rows.mask.shape for state in states):
            return False
        evaluated, in_training = (states[n + plan.calls - 1][rows.mask] for n in (0, plan.calls))
        if not _close(evaluated, in_training, self.tolerance):
            raise NotReplayable("dropout changes in training what they return")
        writer = MemoryWriter(rows.mask.numel(), plan.dtype)
        recorded = record_runs(self.replay, self.singles, plan, plan.layers, writer)
        outputs = None if recorded is None else recorded.read(rows, plan.layers)
        if recorded is None or outputs is None:
            return False
        pairs = [(states[plan.calls - 1][rows.mask], outputs[plan.below - 1][rows.mask])]
        try:
            pairs += _pairs(expected, self.replay.try_out(self.run, plan, recorded), rows)
        except (TypeError, ValueError, AttributeError, RuntimeError):
            return False  # a layer needs what others hand on
        return all(_close(*pair, self.tolerance) for pair in pairs)


def record_runs(
    replay: StackReplay,
    runs: Iterable[Run],
    plan: ReplayPlan,
    layers: tuple[int, ...],
    writer: StateWriter,
) -> RecordedStates | None:
    """Compute the frozen layers for the rows of some runs; None if none has rows of tokens.

    Args:
        replay: the stack of a model in evaluation mode.
        runs: each runs the model on some rows; it is ended behind the frozen layers.
        plan: which layers are frozen.
        layers: those whose output is recorded.
        writer: keeps the outputs.
    """
    recorder = StateRecorder(replay, layers, writer)
    for run in runs:
        calls, _ = replay.watch(run, until=plan.calls)
        if replay.rows is not None:
            recorder.add(calls, replay.rows)
    return recorder.finish() if recorder.places else None


def _pairs(expected: Any, found: Any, rows: StackRows) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensors of two outputs of a model, without the positions of padding."""
    for name, value in expected.items():
        if isinstance(value, Tensor):
            both = value, found[name]
            padded = value.shape[:2] == rows.mask.shape
            yield (both[0][rows.mask], both[1][rows.mask]) if padded else both


def _close(expected: Tensor, found: Tensor, tolerance: float) -> bool:
    """Return whether two tensors agree, relative to their size."""
    first, second = expected.detach().float(), found.detach().float()
    if first.shape != second.shape:
        return False
    size = float(first.nan_to_num(posinf=0, neginf=0).abs().max()) if first.numel() else 0.0
    return torch.allclose(second, first, rtol=tolerance, atol=tolerance * size)

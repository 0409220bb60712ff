"""Faster ways to compute a model, each tried on the first batch before it is used.

A speedup changes the model of a run, and undoes the change at the end. It is used only if it leaves
the loss and gradients of the run's first batch unchanged, and the outputs of an evaluation batch.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from adapterhub.backbones.compare import same
from adapterhub.backbones.probe import evaluation_mode
from adapterhub.loop.engine import Batch, Engine
from adapterhub.status import doing
from adapterhub.tasks.common.batches import model_inputs

_SEED = 0
Results: TypeAlias = Mapping[str, Tensor | None]
Undo: TypeAlias = Callable[[], None]


class NotUsed(Exception):
    """A speedup cannot be used, or would change results."""


class Trial(NamedTuple):
    """The batches for trying a speedup: one of training, one of evaluation."""

    training: Sequence[Batch]
    evaluation: Sequence[Batch] = ()

    def sizes(self) -> str:
        """Return the sizes of the batches."""
        batches = (*self.training, *self.evaluation)
        return str([{n: tuple(t.shape) for n, t in batch.items()} for batch in batches])


class Speedup(ABC):
    """A faster way to compute the model of a run."""

    refusal = ""
    """Prefix of the line that reports why it is not used; "" reports nothing."""
    action = ""
    """Text to show during the trial, if that may take long."""
    trial: Trial | None = None
    """The batches of the trial; None: `patch` itself compares results."""

    @abstractmethod
    def patch(self, engine: Engine) -> Undo | None:
        """Change the model for the currently trained tensors; return the undo function.

        Returns:
            A function that restores the model; None: nothing is changed for these tensors.

        Raises:
            NotUsed: it cannot be used in this run; the model is unchanged.
        """

    def said(self) -> str:
        """Return a line for the user after a trial without differences; "" for none.

        Raises:
            NotUsed: the trial did not reach the changed parts.
        """
        return ""


def first_reason(reasons: Mapping[str, bool]) -> str | None:
    """Return the first reason that applies."""
    return next((reason for reason, applies in reasons.items() if applies), None)


class Speedups:
    """The speedups of one run, each applied on top of those before it. Leaving undoes all."""

    def __init__(
        self, speedups: Iterable[Speedup] = (), note: Callable[[str], None] = lambda text: None
    ) -> None:
        self.speedups, self.note = list(speedups), note
        self.used: list[Speedup] = []
        self._patches = ExitStack()

    def __enter__(self) -> Speedups:
        return self

    def __exit__(self, *error: object) -> None:
        self._undo()

    def enter(self, engine: Engine) -> None:
        """Apply speedups that change no result. Called whenever the trained tensors change."""
        self._undo()
        for speedup in list(self.speedups):
            try:
                self._use(speedup, engine)
            except NotUsed as reason:
                self.speedups.remove(speedup)
                if speedup.refusal:
                    self.note(f"{speedup.refusal}: {reason}")

    def _undo(self) -> None:
        self.used = []
        self._patches.close()

    def _use(self, speedup: Speedup, engine: Engine) -> None:
        trial = speedup.trial or Trial(())
        expected = [compute() for compute in _computations(engine, trial)]
        with ExitStack() as patches:
            undo = speedup.patch(engine)
            if undo is None:
                return
            patches.callback(undo)
            with doing(speedup.action) if speedup.action else nullcontext():
                _compare(expected, _computations(engine, trial), tolerance(engine.model))
            line = speedup.said()
            self._patches.push(patches.pop_all())
        self.used.append(speedup)
        if line:
            self.note(line)


def _compare(
    expected: Iterable[Results], computations: Iterable[Callable[[], Results]], within: float
) -> None:
    for before, compute in zip(expected, computations, strict=True):
        if different := different_result(before, _found(compute), within):
            raise NotUsed(different)


def _found(compute: Callable[[], Results]) -> Results:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # compilers read deprecated attributes
            return compute()
    except Exception as error:  # from another library; the unchanged model works
        raise NotUsed(in_one_line(error)) from error


def _computations(engine: Engine, trial: Trial) -> Iterator[Callable[[], Results]]:
    for batch in trial.training:
        yield partial(_seeded, engine, _trained, batch)
    for batch in trial.evaluation:
        yield partial(_seeded, engine, _evaluated, batch)


def _seeded(engine: Engine, compute: Callable[[Engine, Batch], Results], batch: Batch) -> Results:
    """Compute with fixed random numbers; results are kept on the host."""
    device = engine.device
    moved = {name: tensor.to(device) for name, tensor in batch.items()}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(_SEED)
        results = compute(engine, moved)
    return {n: None if tensor is None else tensor.detach().cpu() for n, tensor in results.items()}


def _trained(engine: Engine, batch: Batch) -> Results:
    """Return the loss of a batch, and the gradients."""
    trained = {n: t for n, t in engine.trainee.tensors().items() if t.requires_grad}
    with torch.enable_grad():
        loss = engine.loss_of(batch)
        if loss is None:
            return {}
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {"the loss": loss, **dict(zip(trained, gradients, strict=True))}


def _evaluated(engine: Engine, batch: Batch) -> Results:
    """Return the outputs of a batch, computed as in an evaluation."""
    with evaluation_mode(engine.model), torch.inference_mode():
        output: Any = engine.model(**model_inputs(batch))
    return {
        f"the {name} of evaluations": value
        for name, value in output.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def with_and_without_padding(batch: Batch) -> list[Batch]:
    """Return a batch without padding, and one with its first row padded, if it has a mask.

    transformers drops a mask that hides nothing, and layers are then computed without it.
    """
    mask = batch.get("attention_mask")
    if mask is None or mask.ndim > 3 or mask.shape[-1] < 2:  # 3: the choices of multiple choice
        return [batch]
    full = torch.ones_like(mask)
    padded = full.clone()
    padded[0, ..., -1] = 0
    return [{**batch, "attention_mask": each} for each in (full, padded)]


def tolerance(model: nn.Module) -> float:
    """Return the allowed relative difference between equal results."""
    dtype, device = next((p.dtype, p.device) for p in model.parameters())
    dtype = getattr(model, "dtype", dtype)
    return 0.05 if dtype != torch.float32 or torch.is_autocast_enabled(device.type) else 1e-3


def different_result(expected: Results, actual: Results, within: float) -> str | None:
    """Return the difference between two results; None if they match, with equal infinities.

    The tolerance `within` is relative to the largest value of a tensor.
    """
    compared = same(expected, actual, within)
    for name, difference in compared.differences.items():
        if not difference <= compared.tolerances[name]:  # true for NaN
            lost = (expected[name] is None) != (actual.get(name) is None)
            return f"{name} would {'have no gradient' if lost else 'be different'}"
    return None


def in_one_line(error: Exception) -> str:
    """Return the beginning of an error, which may have many lines, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([f"{type(error).__name__}:", *lines[:2]])

"""Faster ways to compute what a model computes, each tried on the first batch before it is used.

A speedup changes the model of a run, and undoes that at the end. It is used only if the first batch
of the run has the same loss and gradients with it, and a batch of evaluation the same outputs.
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

from adapterhub.backbones.probe import evaluation_mode
from adapterhub.backbones.same import same
from adapterhub.loop.engine import Batch, Engine
from adapterhub.status import doing
from adapterhub.tasks.common.losses import model_inputs

_SEED = 0
Results: TypeAlias = Mapping[str, Tensor | None]
Undo: TypeAlias = Callable[[], None]


class NotUsed(Exception):
    """A speedup cannot be used, or would change what is computed."""


class Trial(NamedTuple):
    """The batches that a speedup is tried on: of training, and of evaluation."""

    training: Sequence[Batch]
    evaluation: Sequence[Batch] = ()

    def sizes(self) -> str:
        """Return the sizes of the batches."""
        batches = (*self.training, *self.evaluation)
        return str([{n: tuple(t.shape) for n, t in batch.items()} for batch in batches])


class Speedup(ABC):
    """A faster way to compute what the model of a run computes."""

    refusal = ""
    """Begins the line that says why it is not used; empty: nothing is said."""
    action = ""
    """What is shown while it is tried, if that may take long."""
    trial: Trial | None = None
    """What it is tried on; None: `patch` compares by itself."""

    @abstractmethod
    def patch(self, engine: Engine) -> Undo | None:
        """Change the model for the tensors that train now; return what undoes it.

        Returns:
            What restores the model; None: nothing is changed for these tensors.

        Raises:
            NotUsed: it cannot be used in this run; the model is as before.
        """

    def said(self) -> str:
        """Return a line for the user, when the trial has shown no difference; empty: none.

        Raises:
            NotUsed: the trial did not reach what was changed.
        """
        return ""


def first_reason(reasons: Mapping[str, bool]) -> str | None:
    """Return the first reason that applies."""
    return next((reason for reason, applies in reasons.items() if applies), None)


class Speedups:
    """The speedups of one run, each on top of those before it. Leaving undoes all."""

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
        """Use what changes no result. Called whenever other tensors train."""
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
            warnings.simplefilter("ignore")  # compilers read what is deprecated
            return compute()
    except Exception as error:  # of another library; the model as it is computed the batch
        raise NotUsed(in_one_line(error)) from error


def _computations(engine: Engine, trial: Trial) -> Iterator[Callable[[], Results]]:
    for batch in trial.training:
        yield partial(_seeded, engine, _trained, batch)
    for batch in trial.evaluation:
        yield partial(_seeded, engine, _evaluated, batch)


def _seeded(engine: Engine, compute: Callable[[Engine, Batch], Results], batch: Batch) -> Results:
    """Compute with random numbers that are always the same; results are kept on the host."""
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
    """Return the outputs of a batch, as an evaluation computes them."""
    with evaluation_mode(engine.model), torch.inference_mode():
        output: Any = engine.model(**model_inputs(batch))
    return {
        f"the {name} of evaluations": value
        for name, value in output.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def with_and_without_padding(batch: Batch) -> list[Batch]:
    """Return a batch as if no row, and as if the first row were padded, if it has a mask.

    A mask that hides nothing is left out by transformers, and layers are computed without it.
    """
    mask = batch.get("attention_mask")
    if mask is None or mask.ndim > 3 or mask.shape[-1] < 2:  # 3: the choices of multiple choice
        return [batch]
    full = torch.ones_like(mask)
    padded = full.clone()
    padded[0, ..., -1] = 0
    return [{**batch, "attention_mask": each} for each in (full, padded)]


def tolerance(model: nn.Module) -> float:
    """Return by how much equal results may differ, relative to their size."""
    dtype, device = next((p.dtype, p.device) for p in model.parameters())
    dtype = getattr(model, "dtype", dtype)
    return 0.05 if dtype != torch.float32 or torch.is_autocast_enabled(device.type) else 1e-3


def different_result(expected: Results, found: Results, within: float) -> str | None:
    """Return what differs between two results; None if nothing does, as with equal infinities.

    The tolerance `within` is relative to the largest value of a tensor.
    """
    compared = same(expected, found, within)
    for name, difference in compared.differences.items():
        if not difference <= compared.tolerances[name]:  # true for NaN
            lost = (expected[name] is None) != (found.get(name) is None)
            return f"{name} would {'have no gradient' if lost else 'be different'}"
    return None


def in_one_line(error: Exception) -> str:
    """Return the beginning of an error, which may have many lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([f"{type(error).__name__}:", *lines[:2]])

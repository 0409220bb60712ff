"""Loss, gradients and outputs of one batch, before and after a change that must not change them.

A faster way to compute a model (compiled layers, fused kernels) is used only if the first batch of
the run, with and without padding, has the same loss and gradients, and a batch of evaluation the
same outputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from adapterhub.adapters.adapter import Adapter
from adapterhub.tasks._losses import model_inputs
from adapterhub.training.batching import Batch
from adapterhub.training.engine import LossOfBatch

_SEED = 0
Results: TypeAlias = Mapping[str, Tensor | None]


class TriedBatch(NamedTuple):
    """What is compared: a batch of training, one of evaluation if there is one, and the loss."""

    train: Batch
    evaluation: Batch | None
    loss: LossOfBatch

    def sizes(self) -> str:
        """Return the sizes of the batches."""
        batches = [batch for batch in (self.train, self.evaluation) if batch is not None]
        return str([{n: tuple(t.shape) for n, t in batch.items()} for batch in batches])


class BothWays:
    """The computations of one run that are compared.

    Args:
        adapter: the adapter that trains.
        tried: its batches.
    """

    def __init__(self, adapter: Adapter, tried: TriedBatch) -> None:
        self.adapter, self.tried = adapter, tried
        self.model = adapter.model

    def difference(self, before: Callable[[], None], after: Callable[[], None]) -> str | None:
        """Return what a change makes different, or the error that it causes; None: nothing.

        The change is left made.

        Args:
            before: undoes the change.
            after: makes it.
        """
        for compute in self._computations():
            before()
            expected = self._seeded(compute)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # compilers read what is deprecated
                    after()
                    found = self._seeded(compute)
            except Exception as error:  # of another library; the model as it is computed the batch
                return in_one_line(error)
            if different := _difference(expected, found, self._tolerance()):
                return different
        return None

    def _tolerance(self) -> float:
        half = self.model.dtype != torch.float32
        return 0.05 if half or torch.is_autocast_enabled(self.model.device.type) else 1e-3

    def _computations(self) -> Iterator[Callable[[], Results]]:
        for batch in with_and_without_padding(self.tried.train):
            yield partial(self._trained, batch)
        for batch in with_and_without_padding(self.tried.evaluation or {}):
            yield partial(self._evaluated, batch)

    def _seeded(self, compute: Callable[[], Results]) -> Results:
        """Compute with random numbers that are always the same."""
        device = self.model.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(_SEED)
            return compute()

    def _trained(self, batch: Batch) -> Results:
        """Return the loss of a batch, and the gradients."""
        trained = {n: t for n, t in self.adapter.tensors().items() if t.requires_grad}
        with torch.enable_grad():
            loss = self.tried.loss(self._run(batch), self._moved(batch))
            if loss is None:
                return {}
            gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        return {"the loss": loss.detach(), **dict(zip(trained, gradients, strict=True))}

    def _evaluated(self, batch: Batch) -> Results:
        """Return the outputs of a batch, as an evaluation computes them."""
        if not batch:
            return {}
        with evaluating(self.model), torch.inference_mode():
            output = self._run(batch)
        return {
            f"the {name} of evaluations": value
            for name, value in output.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }

    def _run(self, batch: Batch) -> Any:
        return self.model(**model_inputs(self._moved(batch)))

    def _moved(self, batch: Batch) -> dict[str, Tensor]:
        return {name: tensor.to(self.model.device) for name, tensor in batch.items()}


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


def _difference(expected: Results, found: Results, tolerance: float) -> str | None:
    """Return what differs between two results; None if nothing does."""
    sizes = [float(t.float().norm()) for t in expected.values() if t is not None]
    for name, tensor in expected.items():
        other = found.get(name)
        if (tensor is None) != (other is None):
            return f"{name} would have no gradient"
        if tensor is None or other is None:
            continue
        # A tensor whose gradient is nearly zero has rounding errors as large as itself.
        most = tolerance * max(float(tensor.float().norm()), 1e-3 * max(sizes))
        if not float((tensor.float() - other.float()).norm()) <= most:
            return f"{name} would be different"
    return None


def in_one_line(error: Exception) -> str:
    """Return the beginning of an error, which may have many lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([f"{type(error).__name__}:", *lines[:2]])

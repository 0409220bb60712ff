"""Batches of encoded rows by length, and a model's outputs for them.

The processes of a run may divide the batches: each computes some, and all receive all results.
Process p of N computes the batches p, p + N, ... The batches do not depend on the number of
processes, and neither do the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from adapterhub.status import counting
from adapterhub.tasks.common.encoding import in_order
from adapterhub.tasks.common.losses import learned, model_inputs

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel


B = TypeVar("B")
T = TypeVar("T")


@dataclass(frozen=True)
class Division:
    """The processes that divide batches.

    Attributes:
        index: the number of this process, from 0.
        count: the number of processes.
        gather: collects a value from each process, in their order; all call it together.
        in_step: whether all must compute the same number of batches, because each batch is computed
            together (sharded parameters).
    """

    index: int
    count: int
    gather: Callable[[Any], list[Any]]
    in_step: bool = False

    def compute(self, batches: Iterable[B], compute: Callable[[B], T]) -> list[T]:
        """Return the result of each batch, in their order.

        The batches are the same in each process; results are sent to the others.
        """
        own, total, last = list[T](), 0, list[B]()
        for total, batch in enumerate(batches, start=1):
            last = [batch]
            if (total - 1) % self.count == self.index:
                own.append(compute(batch))
        if self.in_step and 0 < total % self.count <= self.index:
            compute(*last)  # others still compute
        every: list[list[T]] = self.gather(own)
        return [every[i % self.count][i // self.count] for i in range(total)]


_DIVISION: ContextVar[Division | None] = ContextVar("division", default=None)


@contextmanager
def dividing(division: Division) -> Iterator[None]:
    """Divide all batches computed inside the context."""
    token = _DIVISION.set(division)
    try:
        yield
    finally:
        _DIVISION.reset(token)


def results(batches: Iterable[B], compute: Callable[[B], T]) -> list[T]:
    """Return the result of each batch, in their order; processes may divide them."""
    division = _DIVISION.get()
    if division is None:
        return [compute(batch) for batch in batches]
    return division.compute(batches, compute)


def in_step() -> bool:
    """Return whether other processes compute their batches in step with this one."""
    division = _DIVISION.get()
    return division is not None and division.in_step


PIXELS = "pixel_values"
"""The input name of images, also of models whose main input is text."""

CPU_TOKENS = 4096
"""Largest padded size of a batch on a CPU, in tokens: larger batches exceed the CPU's caches."""


class Batches(Protocol):
    """Encoded rows that are combined into batches."""

    @property
    def lengths(self) -> list[int]:
        """The size of each row, in tokens."""

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the model inputs for some rows."""


@dataclass(frozen=True)
class Passed:
    """A processed batch: the indices of its rows, the inputs, and the model's output.

    The inputs are on the device of the model, with the labels if there are any. They lack the first
    `skipped` tokens of each row if these were computed before.
    """

    indices: list[int]
    batch: dict[str, Tensor]
    output: Any
    skipped: int = 0


class PromptPrefix(Protocol):
    """A common prefix of rows, which a model has read once for all of them."""

    @property
    def length(self) -> int:
        """The number of tokens of the prefix."""

    @property
    def rows(self) -> frozenset[int]:
        """The rows that begin with the prefix."""

    def continued(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Return the inputs after the prefix, with the model's cache of the prefix."""


def each_row(
    model: PreTrainedModel,
    data: Batches,
    batch_size: int,
    read: Callable[[Passed], Iterable[T]],
    *,
    run: Callable[[dict[str, Tensor]], Any] | None = None,
    prefix: PromptPrefix | None = None,
    even: bool = False,
) -> list[T]:
    """Run a model on all rows, and return the value read from its output for each, in order.

    The model is put in evaluation mode. Rows of similar length share a batch of at most
    `batch_size` rows; if `even`, they have the same length. The values that `read` returns, one per
    row of a batch, are sent to the other processes of the run. `run` and `prefix` are as in
    `each_batch`.
    """

    def numbered(passed: Passed) -> list[tuple[int, T]]:
        return [*zip(passed.indices, read(passed), strict=True)]

    batches = each_batch(model, data, batch_size, numbered, run=run, prefix=prefix, even=even)
    return in_order({index: value for batch in batches for index, value in batch})


def each_batch(
    model: PreTrainedModel,
    data: Batches,
    batch_size: int,
    read: Callable[[Passed], T],
    *,
    labels: bool = False,
    run: Callable[[dict[str, Tensor]], Any] | None = None,
    prefix: PromptPrefix | None = None,
    even: bool = False,
) -> list[T]:
    """Run a model on all rows, and return the value read from its output for each batch.

    Batches are formed as in `each_row`. With `labels` the model also gets the labels, to compute
    its loss. `run` replaces the call of the model and may call it. For rows that start with
    `prefix`, only the remaining tokens are computed.
    """

    def compute(indices: list[int]) -> T:
        batch = on_device(data.batch(indices), model, model.device)
        skipped = prefix.length if prefix and indices[0] in prefix.rows else 0
        if prefix and skipped:
            batch = prefix.continued(batch)
        inputs = {k: v for k, v in model_inputs(batch).items() if labels or k != "labels"}
        with without_gradients(), learned(batch):
            output = model(**inputs) if run is None else run(batch)
        return read(Passed(indices, batch, output, skipped))

    model.eval()
    tokens = CPU_TOKENS if model.device.type == "cpu" else None
    return results(by_length(data, batch_size, tokens, prefix, even=even), compute)


def without_gradients() -> AbstractContextManager[Any]:
    """Return a context that disables gradients.

    Sharded parameters are gathered into tensors that training reuses, so they must not be inference
    tensors.
    """
    import torch  # slow to import

    return torch.no_grad() if in_step() else torch.inference_mode()


def on_device(
    batch: Mapping[str, Tensor], model: nn.Module, device: torch.device
) -> dict[str, Tensor]:
    """Move a batch to a device; images and audio get the dtype of the model."""
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    if (dtype := getattr(model, "dtype", None)) is None:
        return moved
    for name in {getattr(model, "main_input_name", ""), PIXELS} & moved.keys():
        if moved[name].is_floating_point():
            moved[name] = moved[name].to(dtype)
    return moved


def by_length(
    data: Batches,
    batch_size: int,
    tokens: int | None = None,
    prefix: PromptPrefix | None = None,
    *,
    even: bool = False,
) -> Iterator[list[int]]:
    """Yield the row indices of each batch, short rows first, to minimize padding.

    Progress is shown to the user if the work takes long.

    A batch has at most `batch_size` rows and `tokens` tokens with padding, unless a single row has
    more. Rows that start with `prefix` are batched separately. If `even`, a batch has rows of one
    length.
    """
    lengths = data.lengths
    kinds = [(prefix is not None and i in prefix.rows, n * even) for i, n in enumerate(lengths)]
    order = sorted(range(len(lengths)), key=lambda i: (kinds[i], lengths[i]))
    with counting(len(order), "predicting") as done:
        start = 0
        while start < len(order):
            end = min(start + batch_size, len(order))
            while end > start + 1 and (
                kinds[order[end - 1]] != kinds[order[start]]
                or (tokens and (end - start) * lengths[order[end - 1]] > tokens)
            ):
                end -= 1
            yield order[start:end]
            done(end - start)
            start = end


def rows_at_once(batch_size: int, longest: int) -> int:
    """Return the number of the longest rows that `forward` runs at once on a CPU."""
    return min(batch_size, max(CPU_TOKENS // longest, 1))

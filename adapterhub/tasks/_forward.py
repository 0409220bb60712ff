"""Batches of encoded rows by length, and a model's outputs for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from adapterhub.status import counting
from adapterhub.tasks._base import Encoded
from adapterhub.tasks._division import in_step, results
from adapterhub.tasks._losses import model_inputs
from adapterhub.tasks._rows import in_order

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

T = TypeVar("T")

PIXELS = "pixel_values"
"""The input of pictures, also of models whose main input is text."""

CPU_TOKENS = 4096
"""Most padded tokens of a batch on a CPU: larger ones leave its caches, and take more memory."""


@dataclass(frozen=True)
class Passed:
    """A batch that a model has read: the indices of its rows, the inputs, and the model's output.

    The inputs are on the device of the model, with the labels, if there are some.
    """

    indices: list[int]
    batch: dict[str, Tensor]
    output: Any


def each_row(
    model: PreTrainedModel,
    data: Encoded,
    batch_size: int,
    read: Callable[[Passed], Iterable[T]],
) -> list[T]:
    """Run a model on all rows, and return what is read from its output for each, in their order.

    The model is put in evaluation mode. Rows of similar length share a batch of at most
    `batch_size` rows. Other processes of the run get the values that `read` returns, one per row of
    a batch.
    """

    def numbered(passed: Passed) -> list[tuple[int, T]]:
        return [*zip(passed.indices, read(passed), strict=True)]

    batches = each_batch(model, data, batch_size, numbered)
    return in_order({index: value for batch in batches for index, value in batch})


def each_batch(
    model: PreTrainedModel,
    data: Encoded,
    batch_size: int,
    read: Callable[[Passed], T],
    *,
    labels: bool = False,
    run: Callable[[dict[str, Tensor]], Any] | None = None,
) -> list[T]:
    """Run a model on all rows, and return what is read from its output for each batch.

    As `each_row`. With `labels` the model also gets the labels, to compute its loss; `run` computes
    the output of a batch in place of the model, by means of it.
    """

    def compute(indices: list[int]) -> T:
        batch = on_device(data.batch(indices), model, model.device)
        inputs = {k: v for k, v in model_inputs(batch).items() if labels or k != "labels"}
        with without_gradients():
            output = model(**inputs) if run is None else run(batch)
        return read(Passed(indices, batch, output))

    model.eval()
    tokens = CPU_TOKENS if model.device.type == "cpu" else None
    return results(by_length(data, batch_size, tokens), compute)


def without_gradients() -> AbstractContextManager[Any]:
    """Return a context in which a model computes no gradients.

    Sharded parameters are gathered into tensors that training uses later: no inference tensors.
    """
    import torch  # slow to import

    return torch.no_grad() if in_step() else torch.inference_mode()


def on_device(
    batch: Mapping[str, Tensor], model: nn.Module, device: torch.device
) -> dict[str, Tensor]:
    """Move a batch to a device; pictures and sounds get the dtype of the model."""
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    if (dtype := getattr(model, "dtype", None)) is None:
        return moved
    for name in {getattr(model, "main_input_name", ""), PIXELS} & moved.keys():
        if moved[name].is_floating_point():
            moved[name] = moved[name].to(dtype)
    return moved


def by_length(data: Encoded, batch_size: int, tokens: int | None = None) -> Iterator[list[int]]:
    """Yield the row indices of each batch, short rows first, so that little is padded.

    How many rows are done is shown to the user, if that takes long.

    A batch has at most so many rows, and `tokens` with its padding, unless a single row has more.
    """
    lengths = data.lengths
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    with counting(len(order), "predicting") as done:
        start = 0
        while start < len(order):
            end = min(start + batch_size, len(order))
            while tokens and end > start + 1 and (end - start) * lengths[order[end - 1]] > tokens:
                end -= 1
            yield order[start:end]
            done(end - start)
            start = end


def rows_at_once(batch_size: int, longest: int) -> int:
    """Return how many of the longest rows `forward` runs at once on a CPU."""
    return min(batch_size, max(CPU_TOKENS // longest, 1))

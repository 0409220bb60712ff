"""Batches of encoded rows by length, and a model's outputs for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from adapterhub.status import counting
from adapterhub.tasks._base import Encoded

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def forward(
    model: PreTrainedModel, data: Encoded, batch_size: int, *, labels: bool = False
) -> Iterator[tuple[list[int], dict[str, Tensor], Any]]:
    """Run a model on all rows and yield (row indices, batch, output) per batch.

    Args:
        model: the model, put in evaluation mode.
        data: the encoded examples.
        batch_size: rows per forward pass; rows of similar length share a batch.
        labels: whether the model also gets the labels, to compute its loss.
    """
    import torch  # slow to import

    model.eval()
    for indices in by_length(data, batch_size):
        batch = {k: v.to(model.device) for k, v in data.batch(indices).items()}
        inputs = {k: v for k, v in batch.items() if labels or k != "labels"}
        with torch.inference_mode():
            output = model(**inputs)
        yield indices, batch, output


def by_length(data: Encoded, batch_size: int) -> Iterator[list[int]]:
    """Yield the row indices of each batch, short rows first, so that little is padded.

    How many rows are done is shown to the user, if that takes long.
    """
    lengths = data.lengths
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    with counting(len(order), "predicting") as done:
        for start in range(0, len(order), batch_size):
            yield order[start : start + batch_size]
            done(min(batch_size, len(order) - start))

"""Which examples form which batch: a pure function, so resuming a run needs no sampler state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

Batch = Mapping[str, torch.Tensor]

MEGA_BATCH = 50


class BatchList(Protocol):
    """The batches of one epoch. A batch is collated on access, so skipping costs nothing."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch: ...


@runtime_checkable
class StatefulBatches(BatchList, Protocol):
    """Batches that are drawn in order from a stream, whose place a checkpoint keeps."""

    def state(self) -> dict[str, Any]:
        """Return the place of the next batch."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a place."""

    def close(self) -> None:
        """End the reading."""


class LazyBatches:
    """A `BatchList` from index lists (`batch_order`) and a collate function."""

    def __init__(self, order: Sequence[list[int]], collate: Callable[[list[int]], Batch]) -> None:
        self.order = order
        self.collate = collate

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int, /) -> Batch:
        return self.collate(self.order[index])


def batch_order(
    lengths: Sequence[int], batch_size: int, epoch: int, seed: int, grouped: bool
) -> list[list[int]]:
    """Return the index lists of the batches of one epoch; each example is in exactly one.

    The last batch is smaller if the number of examples is not a multiple of `batch_size`. The order
    depends on the arguments alone; global random states are neither read nor changed.

    `lengths` are in tokens. `grouped` sorts shuffled runs of 50 batches by length before they are
    cut, which saves padding; the full batches are then shuffled again, so that lengths do not
    follow an order.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    if grouped:
        order = _sorted_in_runs(order, np.asarray(lengths), batch_size * MEGA_BATCH)
    batches = [
        order[start : start + batch_size].tolist() for start in range(0, len(order), batch_size)
    ]
    full = len(lengths) // batch_size
    return [batches[i] for i in random.permutation(full)] + batches[full:]


def share(window: range, rank: int, world: int) -> list[int]:
    """Return the batches of one optimizer step that one process computes.

    Each process gets the same number of batches; if they do not divide, the first ones are computed
    twice, and count once.
    """
    rounds = -(-len(window) // world)
    return [window[(rank + i * world) % len(window)] for i in range(rounds)]


def _sorted_in_runs(
    order: np.ndarray[tuple[int], np.dtype[np.int64]],
    lengths: np.ndarray[tuple[int], np.dtype[np.int64]],
    run: int,
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    runs = [order[start : start + run] for start in range(0, len(order), run)]
    # A stable sort leaves examples of one length in their shuffled order.
    parts = [part[np.argsort(-lengths[part], kind="stable")] for part in runs]
    return np.concatenate(parts) if parts else order

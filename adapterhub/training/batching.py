"""Which examples form which batch: a pure function, so a resumed run can skip without state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

Batch = Mapping[str, torch.Tensor]

MEGA_BATCH = 50


class BatchList(Protocol):
    """The batches of one epoch. An item is made when it is asked for, so skipping costs nothing."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch: ...


class LazyBatches:
    """A `BatchList` from index lists (`batch_order`) and a function that collates one of them."""

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
    """Index lists of the batches of one epoch; every index of `lengths` is in exactly one.

    All are of `batch_size`, save the last where the count does not divide. With `grouped`, shuffled
    runs of 50 batches are sorted by length (tokens) before they are cut, so that a batch needs
    little padding; then the full batches are shuffled, so that no length comes first. The same
    arguments give the same order: nothing else is read, no global random state is used.
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
    """The batches of one optimizer step that process `rank` of `world` computes.

    Each process gets the same number; where they do not divide, the first are computed twice.
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

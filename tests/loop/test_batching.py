"""The order of batches: complete, seeded, and independent of global state."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.loop.engine import LazyBatches, batch_order, share

lengths = st.lists(st.integers(1, 512), max_size=300)
sizes = st.integers(1, 40)
seeds = st.integers(0, 2**31)


@given(lengths=lengths, size=sizes, epoch=st.integers(0, 50), seed=seeds, grouped=st.booleans())
def test_every_index_is_in_exactly_one_batch(
    lengths: list[int], size: int, epoch: int, seed: int, grouped: bool
) -> None:
    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    batches = batch_order(lengths, size, epoch, seed, grouped)
    assert np.random.rand() == expected, "the global state is left alone"
    torch.manual_seed(1)
    assert batch_order(lengths, size, epoch, seed, grouped) == batches
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(batch) == size for batch in batches[:-1])
    assert all(1 <= len(batch) <= size for batch in batches)


@pytest.mark.parametrize("grouped", [True, False])
def test_epochs_and_seeds_differ(grouped: bool) -> None:
    lengths = [1 + i % 90 for i in range(500)]
    orders = [batch_order(lengths, 8, e, s, grouped) for e in range(3) for s in range(3)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_grouping_saves_nearly_all_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 128, 2000).tolist()

    def padded(grouped: bool) -> int:
        batches = batch_order(lengths, 16, 0, 0, grouped)
        return sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)

    assert padded(True) < 1.05 * sum(lengths)
    assert padded(False) > 1.7 * sum(lengths)


def test_the_order_is_shuffled() -> None:
    lengths = list(range(1600))
    means = [np.mean(batch) for batch in batch_order(lengths, 16, 0, 0, True)]
    assert abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.3
    order = batch_order([1] * 100, 10, 0, 0, False)
    assert [i for batch in order for i in batch] != list(range(100))


@given(start=st.integers(0, 100), size=st.integers(1, 30), world=st.integers(1, 8))
def test_processes_share_a_window_evenly(start: int, size: int, world: int) -> None:
    window = range(start, start + size)
    parts = [share(window, rank, world) for rank in range(world)]
    assert {len(part) for part in parts} == {-(-size // world)}
    assert {i for part in parts for i in part} == set(window)
    assert world > 1 or parts[0] == list(window)


def test_a_batch_is_collated_only_when_asked_for() -> None:
    made: list[list[int]] = []

    def collate(indices: list[int]) -> dict[str, torch.Tensor]:
        made.append(indices)
        return {"x": torch.tensor(indices)}

    batches = LazyBatches([[0, 1], [2, 3], [4]], collate)
    assert len(batches) == 3
    assert batches[2]["x"].tolist() == [4]
    assert made == [[4]]

"""Rows are found again in any batch, with padding on either side."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapterhub.speed.frozen_cache import (
    KeptActivations,
    LayerCall,
    RecordedStates,
    StackRows,
    StateRecorder,
    memory_limit,
)

LENGTHS = {b"a": 3, b"b": 1, b"c": 4}


def states(key: bytes, layer: int) -> torch.Tensor:
    """Return the states of a row: (tokens, 2), unlike those of any other row and layer."""
    count = LENGTHS[key]
    return (torch.arange(count * 2).view(count, 2) + 1 + 10 * key[0] + 1000 * layer).bfloat16()


def batch(keys: list[bytes], side: str, layer: int = 0) -> tuple[StackRows, torch.Tensor]:
    """Return padded rows and the states of a layer, -1 at padding."""
    width = max(LENGTHS[key] for key in keys) + 1
    mask, values = (
        torch.zeros(len(keys), width, dtype=torch.bool),
        torch.full((len(keys), width, 2), -1.0),
    )
    for n, key in enumerate(keys):
        count = LENGTHS[key]
        where = slice(0, count) if side == "right" else slice(width - count, width)
        mask[n, where], values[n, where] = True, states(key, layer).float()
    return StackRows(keys, mask, {}), values


def recorded(layers: tuple[int, ...], *batches: list[bytes]) -> Any:
    """Record batches of two layers that are padded on the right."""
    replay: Any = SimpleNamespace(states=lambda call: call.hidden)
    recorder = StateRecorder(replay, layers, 50)
    for keys in batches:
        rows = batch(keys, "right")[0]
        calls = [LayerCall(n, None, batch(keys, "right", n)[1]) for n in (0, 1)]
        recorder.add(calls, rows)
    return recorder.recorded()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("keys", [[b"c", b"a"], [b"b"], [b"a", b"a", b"b", b"c"]])
def test_a_batch_is_assembled_from_rows_by_its_own_mask(side, keys):
    store = recorded((0, 1), [b"a", b"b"], [b"c"])
    for layer in (0, 1):
        rows, values = batch(keys, side, layer)
        found = store.read(rows, (layer,))[layer]
        assert torch.equal(found[rows.mask].float(), values[rows.mask])
        assert not found[~rows.mask].any()


def test_what_is_not_recorded_is_not_returned():
    store = recorded((1,), [b"a"])
    assert store.read(batch([b"a", b"b"], "right")[0], (1,)) is None
    assert store.read(batch([b"a"], "right")[0], (0,)) is None
    assert set(store.read(batch([b"a"], "right")[0], (1,))) == {1}


def test_a_row_is_recorded_once():
    assert recorded((0,), [b"a", b"a"], [b"a", b"b"]).states.shape == (4, 1, 2)


def test_the_last_call_of_a_shared_layer_counts():
    replay: Any = SimpleNamespace(states=lambda call: call.hidden)
    recorder = StateRecorder(replay, (0,), 3)
    rows = StackRows([b"a"], torch.ones(1, 3, dtype=torch.bool), {})
    recorder.add(
        [LayerCall(0, None, torch.zeros(1, 3, 2)), LayerCall(0, None, torch.ones(1, 3, 2))], rows
    )
    assert recorder.recorded().states.eq(1).all()


def test_the_limit_is_a_part_of_the_machine():
    assert 0 < memory_limit() < 1 << 50


def test_the_latest_outputs_that_fit_are_kept():
    kept = KeptActivations(limit=30)
    for key in "abc":
        kept.keep(key, [], RecordedStates((0,), torch.zeros(5, 1, 1, dtype=torch.bfloat16), {}))
    assert kept.get("c") is not None
    kept.keep("d", [], RecordedStates((0,), torch.zeros(10, 1, 1, dtype=torch.bfloat16), {}))
    assert [key for key in "abcd" if kept.get(key)] == ["c", "d"]
    kept.keep("e", [], RecordedStates((0,), torch.zeros(16, 1, 1, dtype=torch.bfloat16), {}))
    assert not kept.states

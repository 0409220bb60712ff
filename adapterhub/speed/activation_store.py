"""Recorded outputs of layers, of many rows: where each row is, and its batch on demand.

Rows are one behind the other, without padding, in bf16. A batch is assembled by its own mask, so
that rows may be padded on either side and to any length.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from adapterhub.hooks.replay import LayerCall, StackReplay, StackRows
from adapterhub.tasks._rows import Row

DTYPE = torch.bfloat16
GB = 10**9
Places: TypeAlias = dict[bytes, tuple[int, int]]
"""The first token and the number of tokens of each row, by its key."""


@dataclass
class RecordedStates:
    """The outputs of some layers for some rows.

    Attributes:
        layers: the numbers of the layers.
        states: (tokens of all rows, layers, d).
        places: the first token and the number of tokens of each row, by its key.
    """

    layers: tuple[int, ...]
    states: Tensor
    places: Places = field(repr=False)

    def read(self, rows: StackRows, layers: tuple[int, ...]) -> dict[int, Tensor] | None:
        """Return the outputs of some layers, (batch, tokens, d); None if a row is missing."""
        places = [self.places.get(key) for key in rows.keys]
        found = [place for place in places if place is not None]
        if len(found) < len(places) or not set(layers) <= set(self.layers):
            return None
        return {layer: self._batch(self.layers.index(layer), found, rows.mask) for layer in layers}

    def _batch(self, column: int, places: list[tuple[int, int]], mask: Tensor) -> Tensor:
        states = self.states[:, column]
        values = torch.cat([states[start : start + count] for start, count in places])
        values = values.to(mask.device)
        batch = values.new_zeros(*mask.shape, values.shape[-1])
        batch[mask] = values
        return batch


class StateRecorder:
    """Records what the layers of a stack return for rows that the model computes."""

    def __init__(
        self,
        replay: StackReplay,
        layers: tuple[int, ...],
        tokens: int,
        dtype: torch.dtype = DTYPE,
    ) -> None:
        self.replay, self.layers = replay, layers
        self.expected, self.dtype = tokens, dtype
        self.states: Tensor | None = None
        self.places: Places = {}
        self.tokens = 0

    def add(self, calls: Iterable[LayerCall], rows: StackRows) -> None:
        """Add the rows of one call; rows that are there already are left out."""
        outputs = {c.number: c for c in calls}  # of a shared layer, the last call
        states = torch.stack([self.replay.states(outputs[n]) for n in self.layers], 2)
        kept, before = torch.zeros_like(rows.mask), self.tokens
        for row, key in enumerate(rows.keys):
            if key not in self.places:
                count = int(rows.mask[row].sum())
                self.places[key] = self.tokens, count
                self.tokens += count
                kept[row] = rows.mask[row]
        self._write(before, states.detach()[kept].cpu())

    def _write(self, start: int, states: Tensor) -> None:
        """Keep the states of further tokens: (tokens, layers, d)."""
        if self.states is None:
            self.states = torch.empty(self.expected, *states.shape[1:], dtype=self.dtype)
        if (lacking := self.tokens - len(self.states)) > 0:
            more = self.states.new_empty(lacking + start, *states.shape[1:])
            self.states = torch.cat([self.states, more])
        self.states[start : self.tokens] = states

    def recorded(self) -> RecordedStates:
        """Return what was recorded."""
        assert self.states is not None
        return RecordedStates(self.layers, self.states[: self.tokens], self.places)


class KeptActivations:
    """Recorded outputs of several runs on one loaded backbone: the latest ones that fit."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = memory_limit() if limit is None else limit
        # With its rows: a key names them by their address, which holds as long as they are there.
        self.states: dict[Hashable, tuple[Sequence[Row], RecordedStates]] = {}

    def get(self, key: Hashable) -> RecordedStates | None:
        """Return the outputs with a key, if they are kept."""
        return self.states[key][1] if key in self.states else None

    def keep(self, key: Hashable, rows: Sequence[Row], recorded: RecordedStates) -> None:
        """Keep outputs, in place of the oldest ones if there is no room for all."""
        self.states[key] = rows, recorded
        while sum(each.states.nbytes for _, each in self.states.values()) > self.limit:
            del self.states[next(iter(self.states))]


def memory_limit() -> int:
    """Return a quarter of the memory that this process may use, in bytes."""
    try:
        most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        most = 8 * GB
    with contextlib.suppress(OSError, ValueError):  # of a container
        most = min(most, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return most // 4

"""Packed passes: one row with the tokens of several texts, each through its own adapter.

In the slots of projections and sublayers the tokens of the row take the place of the rows of a
batch. The virtual tokens of prefixes and prompts are tokens of the row, at the front of their text:
the keys and values of a prefix replace those that the backbone computes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from adapterhub.errors import AttachError
from adapterhub.hooks.composition import BatchPlan, Composition


class PrefixSpan(NamedTuple):
    """Tokens of a row that are virtual ones of a prefix.

    `key` is its module, `start` the first such token of the row, `first` its number in the prefix.
    """

    key: str
    start: int
    first: int
    tokens: int


class TokenPlan(BatchPlan):
    """Which tokens of a packed row go through which composition in one slot.

    `spans` are, in the slot of an attention, the tokens that are virtual ones.
    """

    def __init__(
        self,
        compositions: Sequence[Composition],
        device: torch.device | str = "cpu",
        spans: Sequence[PrefixSpan] = (),
    ) -> None:
        super().__init__(compositions, device)
        self.spans = tuple(spans)

    def copies(self, batch: int, where: str) -> int:
        """Return 1: a packed row has the tokens of its plan.

        Raises:
            AttachError: it has not.
        """
        if batch != self.rows:
            raise AttachError(f"a packed row of {self.rows} tokens; {where} got {batch}")
        return 1

"""Distribution of the rows of a product over experts: each row is computed by one of them.

transformers multiplies by the weights of experts in several ways. Modules at these sites compute
their own products in the same way, so that a row only costs one expert:

    OneExpert     rows of a single expert, in a loop over experts
    RowsByIndex   expert `numbers[i]` computes row i, with a copy of its matrix
    SortedRows    rows in the order of their experts; expert e ends before row `ends[e]`
    EveryExpert   (experts, rows, d): the same number of rows for each expert
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import _grouped_mm

_ALIGNMENT = 16  # bytes: grouped products on GPUs need rows of multiples of this


class ExpertRows(ABC):
    """The distribution of the rows of a product over experts."""

    @abstractmethod
    def product(self, x: Tensor, weights: Tensor) -> Tensor:
        """Multiply each row by the matrix of its expert.

        x: (rows, d_in), or (experts, rows, d_in) in `EveryExpert`; weights: (experts, d_out, d_in),
        in the dtype of x.

        Returns:
            W_e x for each row: (rows, d_out), or (experts, rows, d_out).
        """

    @abstractmethod
    def select(self, values: Tensor) -> Tensor:
        """Return the vector of each row's expert, to multiply rows by. values: (experts, d)."""


@dataclass(frozen=True)
class OneExpert(ExpertRows):
    """All rows belong to the expert of this number."""

    number: int | Tensor

    def product(self, x: Tensor, weights: Tensor) -> Tensor:
        """Multiply by one matrix."""
        return F.linear(x, weights[self.number])

    def select(self, values: Tensor) -> Tensor:
        """Return one vector: (d,)."""
        return values[self.number]


@dataclass(frozen=True)
class RowsByIndex(ExpertRows):
    """Row i belongs to expert `numbers[i]`. numbers: (rows,)."""

    numbers: Tensor

    def product(self, x: Tensor, weights: Tensor) -> Tensor:
        """Multiply by copies of the matrices."""
        return torch.bmm(weights[self.numbers], x.unsqueeze(-1)).squeeze(-1)

    def select(self, values: Tensor) -> Tensor:
        """Return copies of the vectors: (rows, d)."""
        return values[self.numbers]


@dataclass(frozen=True)
class SortedRows(ExpertRows):
    """The rows of expert e end before row `ends[e]`. ends: (experts,)."""

    ends: Tensor

    def product(self, x: Tensor, weights: Tensor) -> Tensor:
        """Multiply in one grouped product."""
        d_out = weights.shape[1]
        whole = _ALIGNMENT // weights.element_size()
        weights = F.pad(weights, (0, -weights.shape[2] % whole, 0, -d_out % whole))
        x = F.pad(x, (0, weights.shape[2] - x.shape[1]))
        return _grouped_mm(x, weights.transpose(1, 2), self.ends)[:, :d_out]

    def select(self, values: Tensor) -> Tensor:
        """Return copies of the vectors: (rows, d)."""
        counts = self.ends.diff(prepend=self.ends.new_zeros(1))
        return values.repeat_interleave(counts, dim=0)


@dataclass(frozen=True)
class EveryExpert(ExpertRows):
    """Each expert has separate rows, in a leading dimension."""

    def product(self, x: Tensor, weights: Tensor) -> Tensor:
        """Multiply in one batched product."""
        return torch.bmm(x, weights.transpose(1, 2))

    def select(self, values: Tensor) -> Tensor:
        """Return the vectors: (experts, 1, d)."""
        return values[:, None]

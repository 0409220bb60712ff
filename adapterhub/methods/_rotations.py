"""Rotations of the input of a projection, block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from adapterhub.methods._ops import no_autocast, split_last, wide


def in_blocks(x: Tensor, blocks: Tensor) -> Tensor:
    """Multiply the parts of x by a matrix each.

    x: (..., n b), blocks: (n, b, b), or (1, b, b) for all -> like x.
    """
    with no_autocast(x):
        rotated: Tensor = split_last(x, -1, 1, blocks.shape[-1]) @ blocks.to(x.dtype)
        return rotated.flatten(-3)


def skew(upper: Tensor, size: int) -> Tensor:
    """Return skew-symmetric matrices from what is above their diagonals.

    upper: (n, size (size - 1) / 2), row by row -> (n, size, size).
    """
    rows, columns = torch.triu_indices(size, size, 1, device=upper.device)
    matrix = upper.new_zeros(len(upper), size, size)
    matrix[:, rows, columns] = upper
    return matrix - matrix.mT


def cayley(skewed: Tensor, terms: int = 0) -> Tensor:
    """Return rotations (I + Q) (I - Q)^-1 of skew-symmetric matrices Q, (n, b, b).

    `terms`: the number of terms of the series I + 2 Q + 2 Q^2 + ... instead, of which the last one
    counts once; 0 for the exact inverse.
    """
    with no_autocast(skewed):
        skewed = wide(skewed)
        eye = torch.eye(skewed.shape[-1], device=skewed.device, dtype=skewed.dtype)
        if not terms:
            # I - Q has an inverse for each Q; a check of that would wait for the device.
            exact: Tensor = torch.linalg.solve_ex(eye - skewed, eye + skewed).result
            return exact
        total, power = eye.expand_as(skewed), skewed
        for number in range(1, terms):
            total = total + (1.0 if number == terms - 1 > 1 else 2.0) * power
            power = power @ skewed
        return total

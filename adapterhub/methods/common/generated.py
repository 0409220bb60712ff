"""Fixed random numbers that files do not contain: they are computed from a name and a seed.

They are part of the file format (docs/reference/format.md): the same on every machine and in every
version. SplitMix64 on a counter, in whole numbers:

    key = the first 8 bytes of SHA-256("name:seed"), little-endian
    z   = key + (i + 1) 0x9E3779B97F4A7C15,  i = 0, 1, 2, ...                      (modulo 2^64)
    z   = (z ^ (z >> 30)) 0xBF58476D1CE4E5B9
    z   = (z ^ (z >> 27)) 0x94D049BB133111EB
    n_i = z ^ (z >> 31)

Uniform numbers are the upper 24 bits of n_i, exact in fp32; normal ones a sum of 12 of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from adapterhub.methods.common.site_module import SharedModule

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_TERMS = 12  # uniform numbers in a normal one: their variance is 1

Numbers = npt.NDArray[np.uint64]


def whole_numbers(name: str, seed: int, count: int, start: int = 0) -> Numbers:
    """Return numbers of 64 bits of a stream, from the number `start` on."""
    key = int.from_bytes(hashlib.sha256(f"{name}:{seed}".encode()).digest()[:8], "little")
    z = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    z *= np.uint64(_GOLDEN)  # arrays of whole numbers wrap around
    z += np.uint64(key)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    return z


def uniform(name: str, seed: int, shape: Sequence[int], bound: float = 1.0) -> Tensor:
    """Return numbers from -bound to bound, in fp32."""
    upper = whole_numbers(name, seed, math.prod(shape)) >> np.uint64(40)
    values = upper.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    return torch.from_numpy(values * np.float32(bound)).view(*shape)


def normal(name: str, seed: int, shape: Sequence[int], deviation: float = 1.0) -> Tensor:
    """Return numbers of mean 0, each the sum of 12 uniform ones from -1/2 to 1/2, in fp32."""
    upper = whole_numbers(name, seed, _TERMS * math.prod(shape)) >> np.uint64(40)
    sums = upper.reshape(-1, _TERMS).sum(1).astype(np.float64) * 2.0**-24 - _TERMS / 2
    return torch.from_numpy((sums * deviation).astype(np.float32)).view(*shape)


def places(name: str, seed: int, count: int, size: int) -> Tensor:
    """Return `count` different places below `size`, in ascending order.

    They are the first different remainders of the stream by the size. Of more than half of all
    places, those that are left out are drawn.
    """
    drawn = min(count, size - count)
    numbers = np.empty(0, dtype=np.uint64)
    size_drawn = drawn
    while len(numbers) < drawn:
        size_drawn *= 2
        every = whole_numbers(name, seed, size_drawn) % np.uint64(size)
        _, first = np.unique(every, return_index=True)
        numbers = every[np.sort(first)[:drawn]]
    numbers = np.sort(numbers).astype(np.int64)
    if drawn < count:
        numbers = np.setdiff1d(np.arange(size, dtype=np.int64), numbers, assume_unique=True)
    return torch.from_numpy(numbers)


def shares(name: str, seed: int, count: int, size: int) -> Tensor:
    """Return `count` places below `size`, each equally often but for the rest, in a drawn order.

    They are the remainders by the size of the indices of the numbers of the stream, sorted.
    """
    order = np.argsort(whole_numbers(name, seed, count), kind="stable")
    return torch.from_numpy(order % size)


class PlacedNumbers(nn.Module):
    """Trained numbers at fixed places of a matrix, which is zero elsewhere.

    The places are computed from a seed; if `stored`, they are in files, as an import brings them.
    """

    places: Tensor

    def __init__(
        self, name: str, seed: int, count: int, shape: tuple[int, int], stored: bool
    ) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(count))
        self.shape = shape
        drawn = places(name, seed, count, math.prod(shape))
        self.register_buffer("places", drawn, persistent=stored)

    @property
    def limit(self) -> int:
        """The upper bound of all places."""
        return math.prod(self.shape)

    def matrix(self) -> Tensor:
        """Return the matrix with the numbers: `shape`."""
        zeros = self.values.new_zeros(math.prod(self.shape))
        return zeros.index_add(0, self.places, self.values).view(self.shape)


def place_limits(module: nn.Module) -> dict[str, int]:
    """Return for each tensor of places, by its name in the state dict, what all are below."""
    parts: dict[str, Any] = {n: m for n, m in module.named_modules() if hasattr(m, "limit")}
    return {f"{name}.places".lstrip("."): part.limit for name, part in parts.items()}


class FixedFactors(SharedModule):
    """Two fixed tensors A and B, uniform; in files if `stored`.

    Each is given by its shape and the bound of its numbers.
    """

    A: Tensor
    B: Tensor

    def __init__(
        self,
        name: str,
        seed: int,
        a: tuple[Sequence[int], float],
        b: tuple[Sequence[int], float],
        stored: bool,
    ) -> None:
        super().__init__()
        self.register_buffer("A", uniform(f"{name}.A", seed, *a), persistent=stored)
        self.register_buffer("B", uniform(f"{name}.B", seed, *b), persistent=stored)

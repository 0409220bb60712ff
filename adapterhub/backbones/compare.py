"""Compare the results of two computations, up to the rounding of a dtype.

Weights and products are rounded with a relative error of up to u = 2^-24 (fp32), 2^-11 (fp16) or
2^-8 (bf16); over the layers these errors add up like a random walk. The tolerances are about 25 u
for the 16-bit formats, and allow any order of summation in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-1}
_ZERO = 1e-3  # values this small relative to other tensors are rounding errors


@dataclass(frozen=True)
class SameNumbers:
    """The differences of tensors from the expected ones; true if all are the same.

    Attributes:
        differences: the largest absolute difference of each tensor, by name; infinite if a tensor
            is missing or has another shape.
        tolerances: the largest accepted differences.
    """

    differences: dict[str, float]
    tolerances: dict[str, float]

    @property
    def problems(self) -> list[str]:
        """One line for each tensor that differs."""
        return [
            f"{name}: max |difference| {difference:.3g}, tolerance {self.tolerances[name]:.3g}"
            for name, difference in self.differences.items()
            if not difference <= self.tolerances[name]  # true for NaN
        ]

    def __bool__(self) -> bool:
        return not self.problems


def same(
    expected: Mapping[str, Tensor | None],
    actual: Mapping[str, Tensor | None],
    precision: torch.dtype | float,
) -> SameNumbers:
    """Compare tensors with the expected ones, by name; None is a missing gradient.

    `precision` is the dtype of the computation, or the largest accepted difference relative to the
    largest expected value.
    """
    relative = tolerance_of(precision)
    sizes = {name: _size(value) for name, value in expected.items()}
    smallest = max(_ZERO * max(sizes.values(), default=0.0), torch.finfo(torch.float32).tiny)
    return SameNumbers(
        {name: _difference(value, actual.get(name)) for name, value in expected.items()},
        {name: relative * max(size, smallest) for name, size in sizes.items()},
    )


def tolerance_of(precision: torch.dtype | float) -> float:
    """Return the largest accepted difference relative to the largest expected value."""
    return TOLERANCE.get(precision, 1e-4) if isinstance(precision, torch.dtype) else precision


def coarsest_dtype(model: nn.Module) -> torch.dtype:
    """Return the least precise dtype of a model's parameters."""
    dtypes = {parameter.dtype for parameter in model.parameters()} & TOLERANCE.keys()
    return max(dtypes, key=TOLERANCE.__getitem__, default=torch.float32)


def _size(value: Tensor | None) -> float:
    """Return the largest finite absolute value."""
    if value is None or not value.numel():
        return 0.0
    return float(value.detach().float().nan_to_num(posinf=0.0, neginf=0.0).abs().max())


def _difference(expected: Tensor | None, actual: Tensor | None) -> float:
    if expected is None or actual is None or expected.shape != actual.shape:
        return 0.0 if expected is actual else float("inf")
    first, second = expected.detach().float(), actual.detach().float()
    # The logits of classes that a head lacks are infinite in both.
    differences = torch.where(first == second, 0.0, first - second).abs()
    return float(differences.max()) if differences.numel() else 0.0

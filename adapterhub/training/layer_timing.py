"""The time of a training step of one layer, for each dtype and attention implementation.

The layer has the sizes of the backbone's and no trained parameter: a step is its forward pass and
the gradient of its input, which is most of the work of a step with an adapter. Large layers are
scaled down, since the rate of a matrix product no longer depends on its size there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EAGER, SDPA = "eager", "sdpa"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ROUNDS = 4
_WIDEST = 1024  # width of the measured layer
_MOST_WORK = 6e9  # floating point operations of a measured step


class Kernels(NamedTuple):
    """A dtype (fp32 or bf16) and an attention implementation (eager or sdpa)."""

    dtype: str
    attention: str


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a layer and of its input.

    Attributes:
        rows: the number of rows in a batch.
        tokens: the number of tokens in a row.
        width: the width of the hidden states.
        inner: the width between the two feed-forward projections.
        heads: the number of attention heads.
    """

    rows: int
    tokens: int
    width: int
    inner: int
    heads: int

    @property
    def work(self) -> float:
        """Floating point operations of the products with frozen weights, in both directions."""
        weights = self.width * (4 * self.width + 2 * self.inner)
        return 4.0 * self.rows * self.tokens * weights

    def measured(self) -> LayerShape:
        """Return a shape with the same rates whose step takes a fraction of a second."""
        shape = self
        while shape.width > _WIDEST and shape.heads % 2 == 0:
            shape = replace(
                shape, width=shape.width // 2, inner=shape.inner // 2, heads=shape.heads // 2
            )
        while shape.work > _MOST_WORK and shape.rows > 1:
            shape = replace(shape, rows=shape.rows // 2)
        return shape


def time_kernels(shape: LayerShape, candidates: Sequence[Kernels]) -> dict[Kernels, float]:
    """Time one step with each candidate, in turns; return the seconds of the fastest of a few."""
    shape = shape.measured()
    layers = {kernels: _Layer(shape, kernels) for kernels in candidates}
    times: dict[Kernels, list[float]] = {kernels: [] for kernels in candidates}
    for _ in range(_ROUNDS + 1):
        for kernels, layer in layers.items():
            start = time.perf_counter()
            layer.step()
            times[kernels].append(time.perf_counter() - start)
    return {kernels: min(seconds[1:]) for kernels, seconds in times.items()}  # the first warms up


class _Layer:
    """A layer of a transformer with frozen weights, and an input for it."""

    def __init__(self, shape: LayerShape, kernels: Kernels) -> None:
        generator = torch.Generator().manual_seed(0)
        dtype = _DTYPES[kernels.dtype]
        self.shape, self.attention = shape, kernels.attention

        def random(*size: int) -> Tensor:
            return (0.05 * torch.randn(size, generator=generator)).to(dtype)

        width, inner = shape.width, shape.inner
        self.projections = [random(width, width) for _ in range(4)]
        self.up, self.down = random(inner, width), random(width, inner)
        self.x = random(shape.rows, shape.tokens, width).requires_grad_()
        padding = torch.zeros(shape.rows, 1, 1, shape.tokens, dtype=torch.bool)
        padding[0, ..., -1] = shape.tokens > 1
        self.mask = torch.zeros(padding.shape, dtype=dtype).masked_fill(padding, -1e4)

    def step(self) -> None:
        """Compute the output and the gradient of the input."""
        output = self._forward()
        torch.autograd.grad(output, self.x, torch.ones_like(output))

    def _forward(self) -> Tensor:
        query, key, value, out = self.projections
        heads = [self._split(F.linear(self.x, weight)) for weight in (query, key, value)]
        attended = self._attend(*heads).transpose(1, 2).reshape(self.x.shape)
        states = self.x + F.linear(attended, out)
        states = F.layer_norm(states, states.shape[-1:])
        return states + F.linear(F.gelu(F.linear(states, self.up)), self.down)

    def _split(self, states: Tensor) -> Tensor:
        shape = (*states.shape[:2], self.shape.heads, -1)
        return states.view(shape).transpose(1, 2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.attention == SDPA:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)
        scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5 + self.mask
        return torch.matmul(scores.softmax(dim=-1), value)

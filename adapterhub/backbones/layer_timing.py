"""Time a training step of one layer for each dtype and attention implementation.

The layer has the sizes of a backbone layer, without trained parameters. A step is its forward pass
and the gradient of its input, which is most of the work of a step with an adapter. Large layers are
scaled down, since the rate of large matrix products does not depend on their size. Times are
measured once per machine.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterhub.backbones.checkpoint import remembered

EAGER, SDPA = "eager", "sdpa"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ROUNDS = 4
_WIDEST = 1024  # width of the measured layer
_MOST_WORK = 6e9  # floating point operations of a measured step
_SLOW = 2  # times as long as in fp32: less with bf16 instructions, up to 100 without


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
    """Time a few steps of each candidate in turns; return the seconds of the fastest."""
    shape = shape.measured()
    layers = {kernels: _Layer(shape, kernels) for kernels in candidates}
    times: dict[Kernels, list[float]] = {kernels: [] for kernels in candidates}
    for _ in range(_ROUNDS + 1):
        for kernels, layer in layers.items():
            start = time.perf_counter()
            layer.step()
            times[kernels].append(time.perf_counter() - start)
    # The first step warms up.
    return {kernels: min(seconds[1:]) for kernels, seconds in times.items()}


def remembered_times(shape: LayerShape, candidates: Sequence[Kernels]) -> dict[Kernels, float]:
    """Return the seconds of a step with each candidate, measured now or earlier."""
    key = json.dumps([_machine(), vars(shape), candidates])

    def measure() -> list[float]:
        times = time_kernels(shape, candidates)
        return [times[kernels] for kernels in candidates]

    seconds = remembered([], key, measure, folder="kernels")
    return dict(zip(candidates, seconds, strict=True))


def _machine() -> list[Any]:
    """Return the facts that the rates depend on: processor, threads and torch."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    facts = ("model name", "flags", "Features")  # not the clock rate, which changes
    lines = {line for line in text.splitlines() if line.startswith(facts)}
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
    return [platform.machine(), digest, torch.get_num_threads(), torch.__version__]


@cache
def times_in_bf16() -> float:
    """Return the time of a step in bf16 on this processor, relative to fp32."""
    shape = LayerShape(rows=2, tokens=32, width=512, inner=2048, heads=8)  # takes seconds if slow
    fp32, bf16 = (Kernels(dtype, EAGER) for dtype in ("fp32", "bf16"))
    times = remembered_times(shape, (fp32, bf16))
    return times[bf16] / times[fp32]


def without_slow_bf16(dtype: str) -> str:
    """Return the dtype to compute in: fp32 instead of bf16 if this processor is slow in bf16."""
    if dtype != "bf16" or torch.cuda.is_available() or times_in_bf16() < _SLOW:
        return dtype
    return "fp32"


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

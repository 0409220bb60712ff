"""MAM adapter ("mix and match"): prefix tuning and scaled parallel adapters.

    attn:   attention(Q, [P_k; K], [P_v; V])
    ffn:    y' = y + s up(f(down(x)))

    P_k, P_v: (length, d_kv)    x, y: (batch, tokens, d), input and output of the feed-forward
    down: d -> size, up: size -> d, both with bias    f: relu    s: scale

A composition of two methods. The paper uses length 30 and size 512 on backbones of width 768 and
more; the default size here is smaller, for small adapter files.

Parameters: 2 length d_kv + 2 d size + size + d per layer.

He et al. 2022, "Towards a Unified View of Parameter-Efficient Transfer Learning", section 4.6,
https://arxiv.org/abs/2110.04366.
"""

from __future__ import annotations

from dataclasses import dataclass

from adapterhub.config.options import option
from adapterhub.methods.bottleneck import ScaledParallel
from adapterhub.methods.common.base import Layers, Method, register_method
from adapterhub.methods.prefix import Prefix


@register_method
@dataclass(frozen=True)
class Mam(Method):
    """Prefix tuning composed with scaled parallel adapters."""

    sized_by = "size"
    name = "mam"
    paper = "He et al. 2022, https://arxiv.org/abs/2110.04366"
    summary = "prefix tuning + scaled parallel adapters"
    start = "paper"

    length: int = option(30, "prefix length in tokens")
    size: int = option(64, "bottleneck width")
    scale: float = option(4.0, "factor s of the adapters' output")
    layers: Layers = option("all", "layers to adapt: all, 'top 4', '0..3', [0, 5]")

    def parts(self) -> tuple[Method, ...]:
        """Return the two methods."""
        adapter = ScaledParallel(size=self.size, scale=self.scale, layers=self.layers)
        return Prefix(length=self.length, layers=self.layers), adapter

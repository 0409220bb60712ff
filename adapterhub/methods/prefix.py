"""Prefix tuning: learned keys and values in front of those of every attention.

    attention(Q, [P_k; K], [P_v; V])                                             (section 4.1)

    P_k, P_v: (length, d_kv), N(0, 0.02²)    K, V: (tokens, d_kv)
    d_kv: key-value heads times head size

The prefix takes no position, is never masked, and is not kept in the KV cache. Parameters: 2 length
d_kv a site.

Li & Liang 2021, "Prefix-Tuning: Optimizing Continuous Prompts for Generation",
https://arxiv.org/abs/2101.00190.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapterhub.backbones.anatomy import Anatomy
from adapterhub.config import option
from adapterhub.methods.base import Layers, Method, Placement, register, select


class PrefixKeyValues(nn.Module):
    """Gives P_k and P_v, stacked."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(2, length, width) * 0.02)

    def forward(self) -> Tensor:
        """-> (2, length, d_kv): keys, values."""
        return self.prefix


@register
@dataclass(frozen=True)
class Prefix(Method):
    """Learned keys and values in front of every attention."""

    name = "prefix"
    paper = "Li & Liang 2021, https://arxiv.org/abs/2101.00190"
    summary = "learned keys and values in front of every attention"
    start = "paper"
    learning_rate = 1e-2

    length: int = option(30, "prefix length in tokens")
    sites: tuple[str, ...] = option(("attn.kv", "cross.kv"), "attentions to adapt")
    layers: Layers = option("all", "layers to adapt: all, 'top 4', '0..3', [0, 5]")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """One prefix a chosen attention."""
        for site in select(self, anatomy):
            yield Placement(site, PrefixKeyValues(self.length, site.d_out))

    def count(self, anatomy: Anatomy) -> int:
        """2 length d_kv, summed over the sites."""
        return sum(2 * self.length * site.d_out for site in select(self, anatomy))

"""UniPELT: a low-rank update, a prefix and a bottleneck adapter in every layer, each with a gate.

    attn.q, attn.v:  y' = y + g B A x                              g: of the attention's input
    attn:            attention(q, [g P_k; K], [g P_v; V])          g: of the attention's input
    ffn:             y' = y + g up(f(down(y)))                     g: of the adapter's input

g is a sigmoid of one linear output, each site's own (methods/gated.py has its equations). It stands
in the place of LoRA's scale alpha / rank. Sizes of the paper: rank 8, prefix length 10, bottleneck
48. Here each token has its own gate unless `gate: sequence` asks for the paper's mean, and the
adapter reads the feed-forward output before its residual connection, as ours do, where the paper's
reads it behind the normalization.

Mao et al. 2022, "UniPELT: A Unified Framework for Parameter-Efficient Language Model Tuning",
section 3.2, https://arxiv.org/abs/2110.07577.
"""

from __future__ import annotations

from dataclasses import dataclass

from adapterhub.config import option
from adapterhub.methods.base import Layers, Method, register
from adapterhub.methods.bottleneck import Pfeiffer
from adapterhub.methods.gated import Gated, Over
from adapterhub.methods.lora import LoRA
from adapterhub.methods.prefix import Prefix


@dataclass(frozen=True)
class GatedLoRA(Gated, LoRA):
    """Low-rank updates with gates."""


@dataclass(frozen=True)
class GatedPrefix(Gated, Prefix):
    """Prefixes with gates."""


@dataclass(frozen=True)
class GatedPfeiffer(Gated, Pfeiffer):
    """Sequential adapters after feed-forward, with gates."""

    gated_by = "y"


@register
@dataclass(frozen=True)
class UniPELT(Method):
    """Gated LoRA, prefix tuning and sequential adapters."""

    name = "unipelt"
    paper = "Mao et al. 2022, https://arxiv.org/abs/2110.07577"
    summary = "LoRA + prefix tuning + sequential adapters, each with a gate"
    start = "paper"

    rank: int = option(8, "rank of the low-rank updates")
    length: int = option(10, "prefix length in tokens")
    size: int = option(48, "width of the bottleneck")
    gate: Over = option("token", "what has a gate of its own: each token, or a sequence")
    layers: Layers = option("all", "layers to adapt: all, 'top 4', '0..3', [0, 5]")

    def parts(self) -> tuple[Method, ...]:
        """The three methods."""
        lora = GatedLoRA(rank=self.rank, alpha=self.rank, layers=self.layers, gate=self.gate)
        prefix = GatedPrefix(length=self.length, layers=self.layers, gate=self.gate)
        adapter = GatedPfeiffer(size=self.size, layers=self.layers, gate=self.gate)
        return lora, prefix, adapter

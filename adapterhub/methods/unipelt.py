"""UniPELT: a low-rank update, a prefix and a bottleneck adapter in every layer, each with a gate.

    attn.q, attn.v:  y' = y + g B A x
    attn:            attention(q, [g P_k; K], [g P_v; V])
    ffn:             y' = y + g up(f(down(y)))

    g_i = sigmoid(w z_i + b) for each token i
    z: (batch, tokens, d), the input of the attention; at ffn, of the adapter
    w: (1, d), N(0, 0.02²)    b: (1,), zero
    A: (rank, d_in)    B: (d_out, rank)    P_k, P_v: (length, d_kv)    down: d -> size    f: relu

Each site has its own gate, which replaces LoRA's scale alpha / rank. Default sizes are the paper's:
rank 8, prefix length 10, bottleneck 48. Two defaults differ from the paper: a gate per token
(`gate: sequence` is the paper's mean), and adapters that read the feed-forward output before the
residual connection (`source: block` is the paper's, after the normalization).

In `sites` a projection gets a low-rank update, an attention a prefix, and a sublayer an adapter:
`sites: [attn.kv, ffn]` is the paper's UniPELT (AP), without LoRA.

Parameters: rank (d_in + d_out) per projection, 2 length d_kv per attention, 2 d size + size + d per
sublayer, and d + 1 more for the gate of each.

Mao et al. 2022, "UniPELT: A Unified Framework for Parameter-Efficient Language Model Tuning",
section 3.2, https://arxiv.org/abs/2110.07577.
"""

from __future__ import annotations

from dataclasses import dataclass

from adapterhub.anatomy.sites import SUBLAYERS
from adapterhub.config.options import option
from adapterhub.errors import ConfigError
from adapterhub.methods._base import Layers, Method, register_method
from adapterhub.methods._gated import Gated, GateScope
from adapterhub.methods._site_module import Positions
from adapterhub.methods.bottleneck import Pfeiffer, SequentialSource
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


@register_method
@dataclass(frozen=True)
class UniPELT(Method):
    """Gated LoRA, prefix tuning and sequential adapters."""

    sized_by = "size"
    name = "unipelt"
    paper = "Mao et al. 2022, https://arxiv.org/abs/2110.07577"
    summary = "LoRA + prefix tuning + sequential adapters, each with a gate"
    start = "paper"

    rank: int = option(8, "rank of the low-rank updates")
    length: int = option(10, "prefix length in tokens")
    size: int = option(48, "bottleneck width")
    positions: Positions = option(False, "count positions from after the prefix, as for prefix")
    gate: GateScope = option("token", "one gate per token, or per sequence")
    source: SequentialSource = option(
        "output", "input of the adapters: y (output) or norm(r + y) (block)"
    )
    activation: str = option("relu", "activation of the adapters, by its transformers name")
    sites: tuple[str, ...] = option(
        (*LoRA.sites, *Prefix.sites, *Pfeiffer.sites),
        "projections, attentions and sublayers to adapt",
    )
    layers: Layers = option("all", "layers to adapt: all, 'top 4', '0..3', [0, 5]")

    def __post_init__(self) -> None:
        ambiguous = [site for site in self.sites if set("*?[") & set(_kind(site))]
        if ambiguous or not self.sites:
            raise ConfigError(
                "the sites of unipelt must determine which method they get",
                offenders=[repr(site) for site in ambiguous],
                expected="names that end in a projection (attn.q), kv, or a sublayer (ffn)",
                hint="unipelt(sites=['attn.q', 'attn.v', 'attn.kv', 'ffn'])",
            )

    def parts(self) -> tuple[Method, ...]:
        """Return those of the three methods that have sites."""
        lora = tuple(s for s in self.sites if _kind(s) not in ("kv", *SUBLAYERS))
        kv = tuple(s for s in self.sites if _kind(s) == "kv")
        sublayers = tuple(s for s in self.sites if _kind(s) in SUBLAYERS)
        methods: tuple[LoRA | Prefix | Pfeiffer, ...] = (
            GatedLoRA(
                rank=self.rank, alpha=self.rank, sites=lora, layers=self.layers, gate=self.gate
            ),
            GatedPrefix(
                length=self.length,
                positions=self.positions,
                sites=kv,
                layers=self.layers,
                gate=self.gate,
            ),
            GatedPfeiffer(
                size=self.size,
                source=self.source,
                activation=self.activation,
                sites=sublayers,
                layers=self.layers,
                gate=self.gate,
            ),
        )
        return tuple(method for method in methods if method.sites)


def _kind(site: str) -> str:
    """Return the last part of a site's name, which determines its kind."""
    return site.rpartition(".")[2]

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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import SUBLAYERS, Anatomy, Kind, Site
from adapterhub.config.options import option
from adapterhub.errors import ConfigError, SiteError
from adapterhub.methods.bottleneck import Pfeiffer, SequentialSource
from adapterhub.methods.common.base import Layers, Method, Placement, register_method
from adapterhub.methods.common.ops import cast
from adapterhub.methods.common.projections import select_sites
from adapterhub.methods.common.site_module import (
    GatedKeyValueModule,
    KeyValueModule,
    OutputModule,
    Positions,
)
from adapterhub.methods.lora import LoRA
from adapterhub.methods.prefix import Prefix

GateScope = Literal["token", "sequence"]


class Gate(nn.Module):
    """The map z -> sigmoid(w z + b), for each token, or its mean over the sequence."""

    def __init__(self, width: int, scope: GateScope) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, width) * 0.02)
        self.bias = nn.Parameter(torch.zeros(1))
        self.scope = scope

    def forward(self, z: Tensor) -> Tensor:
        """Compute the gates.

        z: (batch, tokens, d) -> (batch, tokens, 1), or (batch, 1, 1) per sequence.
        """
        gate = torch.sigmoid(F.linear(z, cast(self.weight, z), cast(self.bias, z)))
        return gate.mean(-2, keepdim=True) if self.scope == "sequence" else gate

    def extra_repr(self) -> str:
        """Return the settings that `print(model)` shows."""
        return f"per {self.scope}"


class GatedUpdate(OutputModule):
    """The map (x, y) -> y + g (update(x, y) - y), with a gate of y for a sequential bottleneck."""

    def __init__(self, update: OutputModule, gate: Gate) -> None:
        super().__init__()
        self.update = update
        self.gate = gate
        self.source = update.source

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the new output. x: (batch, tokens, d_in), y: (batch, tokens, d_out) -> like y."""
        gate = self.gate(y if self.source == "output" else x).to(y.dtype)
        return torch.addcmul(y, gate, self.update(x, y) - y)


class GatedKeyValues(GatedKeyValueModule):
    """Return prefix keys and values, and their gates."""

    def __init__(self, prefix: KeyValueModule, gate: Gate) -> None:
        super().__init__()
        self.prefix = prefix
        self.gate = gate
        self.positions = prefix.positions

    def forward(self, x: Tensor) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor]:
        """Return keys and values, (2, length, d_kv), and gates, (batch, tokens, 1).

        x: (batch, tokens, d), the input of the attention.
        """
        return self.prefix(), self.gate(x)


@dataclass(frozen=True)
class Gated(Method):
    """A mixin that adds a gate at each site of a method: `class GatedLoRA(Gated, LoRA)`.

    In the paper a sequence has one gate, the mean of its g_i: `gate: sequence`. If all g_i are
    equal, both agree. It is not the default, since its mean includes padding, and in a decoder also
    later tokens. Generation does not have these, so models that generate are refused; classifiers
    on decoders are not.
    """

    gate: GateScope = option("token", "one gate per token, or per sequence")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield the modules of the method, each with a gate.

        Raises:
            SiteError: a gate per sequence in the decoder of a model that generates, or at the
                weights of experts.
        """
        steps = [step for step in super().plan(anatomy) if isinstance(step, Placement)]
        _refuse_experts([step.site for step in steps])
        self._refuse_later_tokens(anatomy, [step.site for step in steps])
        for step in steps:
            gate = Gate(self._width(step.site), self.gate)
            if isinstance(step.module, KeyValueModule):
                yield Placement(step.site, GatedKeyValues(step.module, gate))
            elif isinstance(step.module, OutputModule):
                yield Placement(step.site, GatedUpdate(step.module, gate))
            else:  # skipped positions have no output to gate
                yield step

    def count(self, anatomy: Anatomy) -> int:
        """Add d + 1 per site to the count of the method."""
        sites = select_sites(self, anatomy, *get_args(Kind))
        gates = sum(self._width(site) + 1 for site in sites)
        return super().count(anatomy) + gates

    def _width(self, site: Site) -> int:
        return site.d_in if getattr(self, "source", "input") == "input" else site.d_out

    def _refuse_later_tokens(self, anatomy: Anatomy, sites: list[Site]) -> None:
        ids = [site.id for site in sites if site.stack == "decoder"]
        if self.gate == "sequence" and ids and anatomy.backbone.generates:
            raise SiteError(
                "a gate per sequence reads later tokens, which are not available when "
                f"{type(anatomy.model).__name__} generates",
                offenders=[f"{ids[0]} and {len(ids) - 1} more"],
                expected="only encoder sites, or a model that does not generate, such as a "
                "classifier",
                hint="gate=token",
            )


def _refuse_experts(sites: list[Site]) -> None:
    roles = {site.role for site in sites if site.held and site.held.experts}
    if roles:
        raise SiteError(
            "a gate reads the output of a site, and the weights of routed experts have none",
            offenders=sorted(roles),
            expected="other sites",
            hint="lora, which changes the weights of experts without a gate",
        )


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
        super().__post_init__()
        ambiguous = [site for site in self.sites if set("*?[") & set(_kind(site))]
        if ambiguous or not self.sites:
            raise ConfigError(
                "the sites of unipelt must determine which method they get",
                offenders=[repr(site) for site in ambiguous],
                expected="names that end in a projection (attn.q), kv, or a sublayer (ffn)",
                hint="unipelt(sites=['attn.q', 'attn.v', 'attn.kv', 'ffn'])",
            )

    def parts(self) -> tuple[Method, ...]:
        """Return the methods, of the three, that have sites."""
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

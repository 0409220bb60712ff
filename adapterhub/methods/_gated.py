"""Gates: a network of one output decides for each token how much of a site module counts.

    g_i = sigmoid(w z_i + b)
    at a projection or sublayer:    y'_i = y_i + g_i (m(x, y)_i - y_i)
    at an attention, with q_i:      attention(q_i, [g_i P_k; K], [g_i P_v; V])

    z: (batch, tokens, d), what the module m itself reads: x, or y or norm(r + y) of a sequential
    bottleneck; at an attention its x
    w: (1, d), N(0, 0.02²)    b: (1,), zero    g: (batch, tokens, 1)

Mao et al. 2022, "UniPELT: A Unified Framework for Parameter-Efficient Language Model Tuning",
section 3.2, https://arxiv.org/abs/2110.07577, give one gate to a whole sequence, the mean of its
g_i. That is `gate: sequence`; where all g_i are equal the two agree. It is not the default, for
such a gate counts padding as tokens, and in a decoder reads the tokens that are still to come. A
classifier on a decoder has them all before it; a model that generates does not, and is refused. A
gate of each token does neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.errors import SiteError
from adapterhub.methods._base import Method, Placement
from adapterhub.methods._ops import cast
from adapterhub.methods._site_module import GatedKeyValueModule, KeyValueModule, OutputModule
from adapterhub.methods._sites import select_sites

Over = Literal["token", "sequence"]


class Gate(nn.Module):
    """The map z -> sigmoid(w z + b), of each token, or their mean."""

    def __init__(self, width: int, over: Over) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, width) * 0.02)
        self.bias = nn.Parameter(torch.zeros(1))
        self.over = over

    def forward(self, z: Tensor) -> Tensor:
        """z: (batch, tokens, d) -> (batch, tokens, 1), or (batch, 1, 1) of a whole sequence."""
        gate = torch.sigmoid(F.linear(z, cast(self.weight, z), cast(self.bias, z)))
        return gate.mean(-2, keepdim=True) if self.over == "sequence" else gate

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"one of each {self.over}"


class GatedUpdate(OutputModule):
    """The map (x, y) -> y + g (update(x, y) - y)."""

    def __init__(self, update: OutputModule, gate: Gate) -> None:
        super().__init__()
        self.update = update
        self.gate = gate
        self.source = update.source

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (batch, tokens, d_in), y: (batch, tokens, d_out) -> y' like y."""
        gate = self.gate(y if self.source == "output" else x).to(y.dtype)
        return torch.addcmul(y, gate, self.update(x, y) - y)


class GatedKeyValues(GatedKeyValueModule):
    """Gives prefix keys and values, and their gate."""

    def __init__(self, prefix: KeyValueModule, gate: Gate) -> None:
        super().__init__()
        self.prefix = prefix
        self.gate = gate
        self.positions = prefix.positions

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: (batch, tokens, d), of the attention -> (2, length, d_kv), (batch, tokens, 1)."""
        return self.prefix(), self.gate(x)


@dataclass(frozen=True)
class Gated(Method):
    """What a method becomes that inherits from this and from it: the same, with a gate a site."""

    gate: Over = option("token", "what has a gate of its own: each token, or a sequence")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """The other method's modules, each with a gate.

        Raises:
            SiteError: a gate of a whole sequence in the decoder of a model that generates.
        """
        steps = [step for step in super().plan(anatomy) if isinstance(step, Placement)]
        self._refuse_the_future(anatomy, [step.site for step in steps])
        for step in steps:
            gate = Gate(self._width(step.site), self.gate)
            if isinstance(step.module, KeyValueModule):
                yield Placement(step.site, GatedKeyValues(step.module, gate))
            elif isinstance(step.module, OutputModule):
                yield Placement(step.site, GatedUpdate(step.module, gate))
            else:  # positions that tokens skip: there is nothing to gate
                yield step

    def count(self, anatomy: Anatomy) -> int:
        """The other method's, and d + 1 a site."""
        gates = sum(self._width(site) + 1 for site in select_sites(self, anatomy))
        return super().count(anatomy) + gates

    def _width(self, site: Site) -> int:
        return site.d_in if getattr(self, "source", "input") == "input" else site.d_out

    def _refuse_the_future(self, anatomy: Anatomy, sites: list[Site]) -> None:
        decoding = [site.id for site in sites if site.stack == "decoder"]
        if self.gate == "sequence" and decoding and anatomy.model.can_generate():
            raise SiteError(
                "a gate of a whole sequence reads the tokens that a decoder has yet to give, and "
                f"{type(anatomy.model).__name__} generates one by one",
                offenders=[f"{decoding[0]} and {len(decoding) - 1} more"],
                expected="encoder sites alone, or a model that does not generate: a classifier",
                hint="gate=token",
            )

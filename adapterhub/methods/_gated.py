"""Gates: a linear layer with one output weights the update of a site module for each token.

    g_i = sigmoid(w z_i + b)
    at a projection or sublayer:    y'_i = y_i + g_i (m(x, y)_i - y_i)
    at an attention, with q_i:      attention(q_i, [g_i P_k; K], [g_i P_v; V])

    z: (batch, tokens, d), the input of the module m: x; or y or norm(r + y) for a sequential
    bottleneck; at an attention, its x
    w: (1, d), N(0, 0.02²)    b: (1,), zero    g: (batch, tokens, 1)

In the paper a sequence has one gate, the mean of its g_i: `gate: sequence`. If all g_i are equal,
both agree. It is not the default, since its mean includes padding, and in a decoder also later
tokens. Generation does not have these, so models that generate are refused; classifiers on decoders
are not.

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

from adapterhub.anatomy.sites import Anatomy, Kind, Site
from adapterhub.config.options import option
from adapterhub.errors import SiteError
from adapterhub.methods._base import Method, Placement
from adapterhub.methods._ops import cast
from adapterhub.methods._site_module import GatedKeyValueModule, KeyValueModule, OutputModule
from adapterhub.methods._sites import select_sites

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
    """The map (x, y) -> y + g (update(x, y) - y)."""

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
    """Returns prefix keys and values, and their gates."""

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
    """A mixin that adds a gate at each site of a method: `class GatedLoRA(Gated, LoRA)`."""

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
        if self.gate == "sequence" and ids and anatomy.model.can_generate():
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

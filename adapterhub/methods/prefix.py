"""Prefix tuning: learned keys and values in front of those of every attention.

    attention(Q, [P_k; K], [P_v; V])                                             (section 4.1)

    P_k, P_v: (length, d_kv), N(0, 0.02²)    K, V: (tokens, d_kv)
    d_kv: key-value heads times head size

The prefix takes no position, is never masked, and is not kept in the KV cache. With `positions` the
tokens count theirs behind it, as in implementations that do keep it there; where positions are
relative, `positions: keys` lets keys alone count so, and queries as without it, as in others.
Parameters: 2 length d_kv a site. With `reparametrize` a network gives the prefix while it trains:

    [P_k; P_v] = W_site tanh(W P' + b) + b_site                                  (section 4.3)

    P': (length, d_kv)    W: (middle, d_kv)    W_site: (2 d_kv, middle)

P', W and b are shared by the layers, W_site and b_site are each site's own. The network is folded
away when the adapter is saved: the files hold a plain prefix. Parameters while it trains: length
d_kv + middle (d_kv + 1) for self-attention, and as much for cross-attention and for each stack,
and 2 d_kv (middle + 1) a site.

Li & Liang 2021, "Prefix-Tuning: Optimizing Continuous Prompts for Generation",
https://arxiv.org/abs/2101.00190.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapterhub.anatomy.positions import position_module
from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.errors import SiteError
from adapterhub.methods._base import Layers, Method, Placement, register_method
from adapterhub.methods._options import require_positive
from adapterhub.methods._site_module import EmbeddingModule, KeyValueModule, Positions
from adapterhub.methods._sites import select_sites


class PrefixKeyValues(KeyValueModule):
    """Gives P_k and P_v, stacked; `positions` tells what counts relative positions behind them."""

    def __init__(self, start: Tensor, positions: Positions = False) -> None:
        super().__init__()
        self.prefix = nn.Parameter(start)
        self.positions = positions

    def forward(self) -> Tensor:
        """-> (2, length, d_kv): keys, values."""
        return self.prefix


class Trunk(nn.Module):
    """What the sites of a reparametrized prefix share: tanh(W P' + b)."""

    def __init__(self, length: int, width: int, middle: int) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(length, width))
        self.inner = nn.Linear(width, middle)

    def forward(self) -> Tensor:
        """-> (length, middle)."""
        return torch.tanh(self.inner(self.prefix))


class Reparametrized(KeyValueModule):
    """Gives P_k and P_v, stacked, from the network."""

    def __init__(self, trunk: Trunk, width: int, owner: bool, positions: Positions = False) -> None:
        super().__init__()
        self.positions = positions
        # A child of its first site alone, so that each tensor has one name; in a list elsewhere.
        self.trunk = trunk if owner else None
        self.shared = [trunk]
        self.outer = nn.Linear(trunk.inner.out_features, 2 * width)

    def forward(self) -> Tensor:
        """-> (2, length, d_kv): keys, values."""
        both: Tensor = self.outer(self.shared[0]())
        return both.view(len(both), 2, -1).transpose(0, 1)

    def inference_form(self) -> PrefixKeyValues:
        """The prefix that the network gives now."""
        with torch.no_grad():
            return PrefixKeyValues(self().contiguous(), self.positions)


class Skip(EmbeddingModule):
    """Gives no virtual tokens, and the number of positions that tokens skip."""

    empty: Tensor

    def __init__(self, skips: int, width: int) -> None:
        super().__init__()
        self.skipped_positions = skips
        self.register_buffer("empty", torch.zeros(0, width), persistent=False)

    def forward(self) -> Tensor:
        """-> (0, d)."""
        return self.empty


@register_method
@dataclass(frozen=True)
class Prefix(Method):
    """Learned keys and values in front of every attention."""

    name = "prefix"
    paper = "Li & Liang 2021, https://arxiv.org/abs/2101.00190"
    summary = "learned keys and values in front of every attention"
    start = "paper"
    learning_rate = 1e-2

    length: int = option(30, "prefix length in tokens")
    reparametrize: bool = option(False, "train the prefix as the output of a network")
    middle: int = option(512, "width of that network")
    positions: Positions = option(
        False, "tokens count positions behind the prefix; keys: as relative keys alone"
    )
    sites: tuple[str, ...] = option(("attn.kv", "cross.kv"), "attentions to adapt")
    layers: Layers = option("all", "layers to adapt: all, 'top 4', '0..3', [0, 5]")

    def __post_init__(self) -> None:
        require_positive(self, "length", "middle")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """One prefix a chosen attention.

        Raises:
            SiteError: with `positions`, a stack whose positions cannot be given.
        """
        trunks: dict[tuple[str, str], Trunk] = {}
        sites = select_sites(self, anatomy, "keyvalue")
        if self.positions:
            yield from self._skips(anatomy, sites)
        for site in sites:
            relative = self.positions if site.bias else False
            if not self.reparametrize:
                start = torch.randn(2, self.length, site.d_out) * 0.02
                yield Placement(site, PrefixKeyValues(start, relative))
                continue
            owner = _kind(site) not in trunks
            if owner:
                trunks[_kind(site)] = Trunk(self.length, site.d_out, self.middle)
            trunk = trunks[_kind(site)]
            yield Placement(site, Reparametrized(trunk, site.d_out, owner, relative))

    def _skips(self, anatomy: Anatomy, sites: tuple[Site, ...]) -> Iterator[Placement]:
        relative = {site.stack for site in anatomy.sites.values() if site.bias}
        for stack in sorted({site.stack for site in sites} - relative):
            if self.positions == "keys":
                raise SiteError(
                    f"keys have no positions of their own in a {anatomy.model.config.model_type} "
                    f"{stack}",
                    expected="attention with a bias of relative positions, as T5 has",
                    hint="prefix(positions=true)",
                )
            embed = anatomy.sites.get(f"{stack}.embed")
            root = anatomy.model.get_submodule(embed.host) if embed else None
            if embed is None or root is None or position_module(root) is None:
                raise SiteError(
                    f"the positions of a {anatomy.model.config.model_type} {stack} cannot be given",
                    expected="a stack that takes position_ids, or whose table of positions does",
                    hint="prefix(positions=false)",
                )
            yield Placement(embed, Skip(self.length, embed.d_out))

    def count(self, anatomy: Anatomy) -> int:
        """2 length d_kv, summed over the sites; with a network, its size."""
        sites = select_sites(self, anatomy, "keyvalue")
        if not self.reparametrize:
            return sum(2 * self.length * site.d_out for site in sites)
        widths = {_kind(site): site.d_out for site in reversed(sites)}.values()
        shared = sum(self.length * d + self.middle * (d + 1) for d in widths)
        return shared + sum(2 * site.d_out * (self.middle + 1) for site in sites)

    def rate(self, name: str) -> float:
        """A network learns at a tenth of the rate of a plain prefix."""
        return 0.1 if self.reparametrize else 1.0

    def inference_form(self) -> Prefix:
        """A plain prefix."""
        return dataclasses.replace(self, reparametrize=False)


def _kind(site: Site) -> tuple[str, str]:
    return site.stack, site.role

"""Compacter: bottleneck adapters whose weights are sums of Kronecker products.

    y' = y + up(f(down(y)))    up, down: x W + b    W = sum_i A_i (x) (s_i t_i)  (equations 2, 3)

or, with the source `block`, down(norm(r + y)), as in the bottleneck adapters.

    y: (..., d)    A: (n, n, n), one for all sites, kept with the first    i = 1..n
    W of down: (d, size)    s: (n, d/n, rank), t: (n, rank, size/n)    (x): the Kronecker product
    W of up: (size, d)      s: (n, size/n, rank), t: (n, rank, d/n)

A has a standard deviation of 0.01, s and t are Glorot-uniform, so that the update is small at
first. `sites: [ffn]` is the paper's Compacter++. Parameters: n^3, and (2 rank + 1)(d + size) a
site.

Karimi Mahabadi et al. 2021, "Compacter: Efficient Low-Rank Hypercomplex Adapter Layers", section 3,
https://arxiv.org/abs/2106.04647.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import STREAM, Anatomy, Site
from adapterhub.config.options import option
from adapterhub.errors import ConfigError
from adapterhub.methods._base import Layers, Method, Placement, register_method
from adapterhub.methods._ops import cast
from adapterhub.methods._options import activation as activation_of
from adapterhub.methods._options import require_positive
from adapterhub.methods._site_module import OutputModule
from adapterhub.methods._sites import require_stream, select_sites
from adapterhub.methods.bottleneck import Sequential


class Shared(nn.Module):
    """Holds A."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.A = nn.Parameter(0.01 * torch.randn(n, n, n))


class KroneckerLinear(nn.Module):
    """The map x -> x W + b, W = sum_i A_i (x) (s_i t_i); A belongs to all such layers."""

    def __init__(self, shared: Shared, d_in: int, d_out: int, rank: int) -> None:
        super().__init__()
        n = len(shared.A)
        # In a list it is not a child: A stays one tensor of the state dict, as savers require.
        self.shared = [shared]
        self.s = nn.Parameter(torch.empty(n, d_in // n, rank))
        self.t = nn.Parameter(torch.empty(n, rank, d_out // n))
        self.bias = nn.Parameter(torch.zeros(d_out))
        for factors in (self.s, self.t):
            for factor in factors.data:
                nn.init.xavier_uniform_(factor)

    def weight(self) -> Tensor:
        """W: (d_in, d_out)."""
        products = self.s @ self.t  # (n, d_in / n, d_out / n)
        blocks = torch.einsum("iab,ipq->apbq", self.shared[0].A, products)
        return blocks.reshape(len(self.s) * self.s.shape[1], -1)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., d_in) -> (..., d_out)."""
        return F.linear(x, cast(self.weight(), x).T, cast(self.bias, x))


class KroneckerBottleneck(OutputModule):
    """The map (x, y) -> y + up(f(down(source))). The first of all `keeps` what they share."""

    def __init__(
        self,
        shared: Shared,
        keeps: bool,
        width: int,
        size: int,
        rank: int,
        activation: str,
        source: Sequential,
    ) -> None:
        super().__init__()
        self.source = source
        if keeps:
            self.shared = shared
        self.down = KroneckerLinear(shared, width, size, rank)
        self.activation = activation_of(activation)
        self.up = KroneckerLinear(shared, size, width, rank)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (..., d_in), y: (..., d) -> y' like y."""
        source = y if self.source == "output" else x
        update: Tensor = self.up(self.activation(self.down(source)))
        return y + update.to(y.dtype)


@register_method
@dataclass(frozen=True)
class Compacter(Method):
    """Bottleneck adapters out of Kronecker products with shared factors."""

    name = "compacter"
    paper = "Karimi Mahabadi et al. 2021, https://arxiv.org/abs/2106.04647"
    summary = "bottleneck adapters out of Kronecker products with shared factors"
    start = "near-identity"
    learning_rate = 3e-3

    size: int = option(64, "width of the bottleneck")
    n: int = option(4, "number of Kronecker products; divides the size and the backbone's width")
    rank: int = option(1, "rank of the factors s_i t_i")
    activation: str = option("gelu", "activation, by its transformers name")
    source: Sequential = option("output", "what the network reads: y (output), norm(r + y) (block)")
    sites: tuple[str, ...] = option(("attn", "cross", "ffn"), "sublayers to adapt")
    layers: Layers = option("all", "layers to adapt: all, 'top 4', '0..3', [0, 5]")

    def __post_init__(self) -> None:
        require_positive(self, "size", "n", "rank")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """One network a chosen sublayer, and one A for all of them.

        Raises:
            ConfigError: n does not divide the size or a width.
        """
        sites = self._sites(anatomy)
        if wrong := [w for w in sorted({self.size, *(s.d_out for s in sites)}) if w % self.n]:
            raise ConfigError(
                f"{self.name}(n={self.n}) does not divide {', '.join(map(str, wrong))}",
                expected="an n that divides the size and the width of the backbone",
            )
        shared = Shared(self.n)
        for site in sites:
            network = KroneckerBottleneck(
                shared,
                site is sites[0],
                site.d_out,
                self.size,
                self.rank,
                self.activation,
                self.source,
            )
            yield Placement(site, network)

    def count(self, anatomy: Anatomy) -> int:
        """n^3 + (2 rank + 1)(d + size), the latter summed over the sites."""
        each = (site.d_out + self.size for site in self._sites(anatomy))
        return int(self.n**3 + (2 * self.rank + 1) * sum(each))

    def _sites(self, anatomy: Anatomy) -> tuple[Site, ...]:
        sites = select_sites(self, anatomy)
        if self.source in STREAM:
            require_stream(self, self.source, sites)
        return sites

"""Compacter: bottleneck adapters whose weights are sums of Kronecker products.

    y' = y + up(f(down(y)))    up, down: x W + b    W = sum_i A_i (x) (s_i t_i)  (equations 2, 3)

or down(norm(r + y)) with the source `block`, as for bottleneck adapters.

    y: (..., d)    A: (n, n, n), shared by all sites, stored at the first    i = 1..n
    W of down: (d, size)    s: (n, d/n, rank), t: (n, rank, size/n)    (x): the Kronecker product
    W of up: (size, d)      s: (n, size/n, rank), t: (n, rank, d/n)

A is initialized from N(0, 0.01²), s and t Glorot-uniform, so the initial update is small.
`sites: [ffn]` is the paper's Compacter++.

Parameters: n³, and (2 rank + 1)(d + size) per site.

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
from adapterhub.methods.bottleneck import Bottleneck, SequentialSource
from adapterhub.methods.common.base import (
    Layers,
    Method,
    Placement,
    activation_module,
    register_method,
)
from adapterhub.methods.common.ops import cast
from adapterhub.methods.common.projections import require_stream, select_sites
from adapterhub.methods.common.site_module import OutputModule, SharedModule


class SharedFactors(SharedModule):
    """The factors A, shared by all sites."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.A = nn.Parameter(0.01 * torch.randn(n, n, n))


class KroneckerLinear(nn.Module):
    """The map x -> x W + b, with W = sum_i A_i (x) (s_i t_i) and the shared A."""

    def __init__(self, shared: SharedFactors, d_in: int, d_out: int, rank: int) -> None:
        super().__init__()
        n = len(shared.A)
        # In a list it is not a child module, so A has only one name in the state dict.
        self.shared = [shared]
        self.s = nn.Parameter(torch.empty(n, d_in // n, rank))
        self.t = nn.Parameter(torch.empty(n, rank, d_out // n))
        self.bias = nn.Parameter(torch.zeros(d_out))
        for factors in (self.s, self.t):
            for factor in factors.data:
                nn.init.xavier_uniform_(factor)

    def weight(self) -> Tensor:
        """Compute W: (d_in, d_out)."""
        products = self.s @ self.t  # (n, d_in / n, d_out / n)
        blocks = torch.einsum("iab,ipq->apbq", self.shared[0].A, products)
        return blocks.reshape(len(self.s) * self.s.shape[1], -1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute x W + b. x: (..., d_in) -> (..., d_out)."""
        return F.linear(x, cast(self.weight(), x).T, cast(self.bias, x))


class KroneckerBottleneck(OutputModule):
    """The map (x, y) -> y + up(f(down(source))).

    The module at the first site has `owns_shared`: A is stored there.
    """

    def __init__(
        self, method: Compacter, width: int, shared: SharedFactors, owns_shared: bool
    ) -> None:
        super().__init__()
        self.source = method.source
        if owns_shared:
            self.shared = shared
        self.down = KroneckerLinear(shared, width, method.size, method.rank)
        self.activation = activation_module(method.activation)
        self.up = KroneckerLinear(shared, method.size, width, method.rank)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the new output. x: (..., d_in), y: (..., d) -> y' like y."""
        source = y if self.source == "output" else x
        update: Tensor = self.up(self.activation(self.down(source)))
        return y + update.to(y.dtype)

    def constant(self, site: Site) -> Bottleneck:
        """Return the same network with its weights written out."""
        width, size = len(self.up.bias), len(self.down.bias)
        with torch.device("meta"):
            network = Bottleneck(width, width, size, "relu", self.source, 1.0)
        network.activation = self.activation
        for linear, factored in ((network.down, self.down), (network.up, self.up)):
            linear.weight = nn.Parameter(factored.weight().T.contiguous(), requires_grad=False)
            linear.bias = nn.Parameter(factored.bias.detach(), requires_grad=False)
        return network


@register_method
@dataclass(frozen=True)
class Compacter(Method):
    """Bottleneck adapters built from Kronecker products with shared factors."""

    sized_by = "rank"
    name = "compacter"
    paper = "Karimi Mahabadi et al. 2021, https://arxiv.org/abs/2106.04647"
    summary = "bottleneck adapters built from Kronecker products with shared factors"
    start = "near-identity"
    learning_rate = 3e-3

    size: int = option(64, "bottleneck width", least=1)
    n: int = option(
        4, "number of Kronecker products; must divide size and the backbone's width", least=1
    )
    rank: int = option(1, "rank of the products s_i t_i", least=1)
    activation: str = option("gelu", "activation function, by its transformers name")
    source: SequentialSource = option(
        "output", "input of the network: y (output) or norm(r + y) (block)"
    )
    sites: tuple[str, ...] = option(("attn", "cross", "ffn"), "sublayers to adapt")
    layers: Layers = option("all", "layers to adapt: all, 'top 4', '0..3', [0, 5]")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one network per selected sublayer, with one A for all of them.

        Raises:
            ConfigError: n does not divide the size or a width.
        """
        sites = self._sites(anatomy)
        widths = sorted({self.size, *(site.d_out for site in sites)})
        if indivisible := [width for width in widths if width % self.n]:
            raise ConfigError(
                f"{self.name}(n={self.n}) does not divide {', '.join(map(str, indivisible))}",
                expected="an n that divides the size and the width of the backbone",
            )
        shared = SharedFactors(self.n)
        for site in sites:
            network = KroneckerBottleneck(self, site.d_out, shared, owns_shared=site is sites[0])
            yield Placement(site, network)

    def count(self, anatomy: Anatomy) -> int:
        """Add up n³, and (2 rank + 1)(d + size) over the sites."""
        widths = sum(site.d_out + self.size for site in self._sites(anatomy))
        return int(self.n**3 + (2 * self.rank + 1) * widths)

    def _sites(self, anatomy: Anatomy) -> tuple[Site, ...]:
        sites = select_sites(self, anatomy)
        if self.source in STREAM:
            require_stream(self, self.source, sites)
        return sites

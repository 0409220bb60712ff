"""AdapterFusion: several trained adapters, frozen, and a learned mix of what they do.

    u_n = m_n(x, y) - y                                       what adapter n adds at this site
    s   = softmax_n((Q y + b)ᵀ K u_n)                         of each token by itself
    y'  = y + V sum_n s_n u_n                                 (section 3.2)

    x, y: (batch, tokens, d_in), (batch, tokens, d)    u: (batch, tokens, N, d)    s: (..., N)
    Q, K: (d, d), N(0, 0.02²)    b: (d,), zero    V: (d, d), identity

Q, b, K and V train: 3 d² + d a site. The adapters do not: they are copied in when the fusion is
attached, and saved with it, so that one folder holds all that it needs, and nothing that happens to
the adapters afterwards changes it. They must sit at the same sites, and be of methods that map
(x, y) to y' and leave the backbone's own parameters alone. Their task heads are not used. The
paper's penalty on V, which keeps it near the identity, is left out: V starts there, and the
learning rate is small. b is not in the paper; without it, Q is its Q.

Pfeiffer et al. 2021, "AdapterFusion: Non-Destructive Task Composition for Transfer
Learning", https://arxiv.org/abs/2005.00247.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import STREAM, Anatomy, Site
from adapterhub.config.options import option
from adapterhub.errors import ConfigError, SiteError
from adapterhub.methods._base import Method, Placement, TrainedSource, register_method
from adapterhub.methods._ops import cast
from adapterhub.methods._site_module import OutputModule, SiteModule
from adapterhub.methods._spec import dump_methods, parse_methods


class Fusion(OutputModule):
    """The map (x, y) -> y + V sum_n s_n (m_n(x, y) - y)."""

    def __init__(self, members: Sequence[OutputModule], width: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(freeze(member) for member in members)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        for linear in (self.query, self.key):
            nn.init.normal_(linear.weight, std=0.02)
        nn.init.zeros_(self.query.bias)
        nn.init.eye_(self.value.weight)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (..., d_in), y: (..., d) -> y' like y."""
        updates = torch.stack([member(x, y) - y for member in self.members], dim=-2)
        # qᵀ (K u) is (Kᵀ q)ᵀ u, and V passes through the sum: one product each, not N.
        query = F.linear(y, cast(self.query.weight, y), cast(self.query.bias, y))
        probe = F.linear(query, cast(self.key.weight, y).T)
        share = (updates * probe[..., None, :]).sum(-1).softmax(-1)
        mixed = (share[..., None] * updates).sum(-2)
        return y + F.linear(mixed, cast(self.value.weight, y)).to(y.dtype)

    def train(self, mode: bool = True) -> Fusion:
        """The members stay in evaluation mode."""
        super().train(mode)
        self.members.eval()
        return self


def freeze(module: OutputModule) -> OutputModule:
    """A module whose parameters are buffers now: saved with it, never trained."""
    for part in module.modules():
        for name in list(part._parameters):
            parameter = part._parameters.pop(name)
            part.register_buffer(name, None if parameter is None else parameter.detach())
    return module


@register_method
@dataclass(frozen=True)
class AdapterFusion(Method):
    """A learned mix of trained adapters."""

    name = "adapterfusion"
    paper = "Pfeiffer et al. 2021, https://arxiv.org/abs/2005.00247"
    summary = "a learned mix of several trained adapters, which stay as they are"
    start = "paper"
    learning_rate = 5e-5

    adapters: tuple[str, ...] = option(
        (), "the trained adapters to mix: names on the model, or folders"
    )
    members: tuple[Any, ...] = option((), "their methods; filled in from the adapters")

    @classmethod
    def example(cls) -> AdapterFusion:
        """Of two adapters that are not trained."""
        return cls(members=("pfeiffer", "pfeiffer"))

    def sources(self) -> tuple[str, ...]:
        """The adapters, until they have become members."""
        return () if self.members else self.adapters

    def built_of(self, sources: Sequence[TrainedSource]) -> tuple[AdapterFusion, dict[str, Tensor]]:
        """The fusion with their methods as members, and what the tensors of these are."""
        members = tuple(list(dump_methods(source.methods)) for source in sources)
        names = tuple(source.name for source in sources)
        start: dict[str, Tensor] = {}
        for number, source in enumerate(sources):
            for part in (part for method in source.methods for part in method.parts()):
                for name, tensor in source.tensors.items():
                    site, here, rest = name.partition(f".{part.name}.")
                    if here:
                        start[f"{site}.{self.name}.members.{number}.{rest}"] = tensor
        return dataclasses.replace(self, adapters=names, members=members), start

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """One mix a site of the members.

        Raises:
            ConfigError: fewer than two adapters. SiteError: adapters that cannot be mixed.
        """
        for site, modules in self._sites(anatomy):
            yield Placement(site, Fusion(modules, site.d_out))

    def count(self, anatomy: Anatomy) -> int:
        """3 d² + d, summed over the sites."""
        with torch.random.fork_rng(devices=[]):
            sites = [site for site, _ in self._sites(anatomy)]
        return sum(3 * site.d_out**2 + site.d_out for site in sites)

    def _sites(self, anatomy: Anatomy) -> list[tuple[Site, list[OutputModule]]]:
        if len(self.members) < 2:
            raise ConfigError(
                f"{self.name} of {len(self.members)} adapters",
                expected="two or more trained adapters: names on the model, or folders",
                hint=f"{self.name}(adapters=['runs/a', 'runs/b'])",
            )
        names = [repr(name) for name in self.adapters]
        names += [f"member {n}" for n in range(len(names), len(self.members))]
        placed = [_placed(m, name, anatomy) for m, name in zip(self.members, names, strict=False)]
        first = placed[0]
        if wrong := [n for n, m in zip(names, placed, strict=False) if m.keys() != first.keys()]:
            raise SiteError(
                f"adapters that do not sit where {names[0]} sits cannot be mixed with it",
                offenders=wrong,
                expected=", ".join(sorted({anatomy.sites[site].role for site in first})),
            )
        return [(anatomy.sites[site], [m[site] for m in placed]) for site in first]


def _placed(member: Any, called: str, anatomy: Anatomy) -> dict[str, OutputModule]:
    """The modules of one member, by their sites.

    Raises:
        SiteError: some are none that map (x, y) to y', or two sit at one site.
    """
    modules: dict[str, OutputModule] = {}
    wrong = set()
    for part in (part for method in parse_methods(member) for part in method.parts()):
        for step in part.plan(anatomy):
            if (
                isinstance(step, Placement)
                and _mixable(step.module)
                and step.site.id not in modules
            ):
                modules[step.site.id] = step.module
            else:
                wrong.add(part.name)
    if wrong:
        raise SiteError(
            f"the adapter {called} cannot be mixed with others",
            offenders=sorted(wrong),
            expected="one method a site, of those that change what a projection or a sublayer puts "
            "out, and read nothing but its input and output: houlsby, pfeiffer, parallel, "
            "compacter, lora",
        )
    return modules


def _mixable(module: SiteModule) -> TypeGuard[OutputModule]:
    return (
        isinstance(module, OutputModule) and not module.reads_weight and module.source not in STREAM
    )

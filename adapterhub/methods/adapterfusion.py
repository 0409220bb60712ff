"""AdapterFusion: a learned mix of the updates of several trained, frozen adapters.

    u_n = m_n(x, y) - y                                       the update of adapter n at this site
    s   = softmax_n((Q y + b)ᵀ K u_n)                         for each token
    y'  = y + V sum_n s_n u_n                                 (section 3.2)

    x, y: (batch, tokens, d_in), (batch, tokens, d)    u: (batch, tokens, N, d)    s: (..., N)
    Q, K: (d, d), N(0, 0.02²)    b: (d,), zero    V: (d, d), identity

Q, b, K and V train. The adapters are copied when the fusion is attached, and saved with it: its
folder is complete, and later changes of the adapters do not affect it. They must adapt the same
sites, with methods that map (x, y) to y' and train no backbone parameters. Their task heads are not
used. The paper's penalty that keeps V near the identity is omitted: V is initialized there, and the
learning rate is small. b is not in the paper.

Parameters: 3 d² + d per site.

Pfeiffer et al. 2021, "AdapterFusion: Non-Destructive Task Composition for Transfer Learning",
section 3.2, https://arxiv.org/abs/2005.00247.
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
from adapterhub.methods.common.base import (
    Method,
    Placement,
    TrainedSource,
    dump_methods,
    parse_methods,
    register_method,
)
from adapterhub.methods.common.ops import cast
from adapterhub.methods.common.site_module import OutputModule, SiteModule


class FusionLayer(OutputModule):
    """The map (x, y) -> y + V sum_n s_n (m_n(x, y) - y)."""

    source = "output"  # the query reads y; x is only passed to the members

    def __init__(self, members: Sequence[OutputModule], width: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(parameters_to_buffers(member) for member in members)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        for linear in (self.query, self.key):
            nn.init.normal_(linear.weight, std=0.02)
        nn.init.zeros_(self.query.bias)
        nn.init.eye_(self.value.weight)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the new output. x: (..., d_in), y: (..., d) -> y' like y."""
        updates = torch.stack([member(x, y) - y for member in self.members], dim=-2)
        # qᵀ (K u) = (Kᵀ q)ᵀ u, and V sum_n = sum_n V: one product each instead of N.
        query = F.linear(y, cast(self.query.weight, y), cast(self.query.bias, y))
        probe = F.linear(query, cast(self.key.weight, y).T)
        share = (updates * probe[..., None, :]).sum(-1).softmax(-1)
        mixed = (share[..., None] * updates).sum(-2)
        return y + F.linear(mixed, cast(self.value.weight, y)).to(y.dtype)

    def train(self, mode: bool = True) -> FusionLayer:
        """Set the mode; the members stay in evaluation mode."""
        super().train(mode)
        self.members.eval()
        return self


def parameters_to_buffers(module: OutputModule) -> OutputModule:
    """Turn the parameters of a module into buffers: saved with it, but never trained."""
    for child in module.modules():
        for name in list(child._parameters):
            parameter = child._parameters.pop(name)
            child.register_buffer(name, None if parameter is None else parameter.detach())
    return module


@register_method
@dataclass(frozen=True)
class AdapterFusion(Method):
    """A learned mix of trained adapters."""

    name = "adapterfusion"
    paper = "Pfeiffer et al. 2021, https://arxiv.org/abs/2005.00247"
    summary = "learned mix of several trained adapters, which stay frozen"
    start = "paper"
    learning_rate = 5e-5

    adapters: tuple[str, ...] = option(
        (), "trained adapters to mix: names of attached adapters, or folders"
    )
    members: tuple[Any, ...] = option((), "methods of these adapters (set automatically)")

    @classmethod
    def example(cls) -> AdapterFusion:
        """Return a fusion of two untrained adapters."""
        return cls(members=("pfeiffer", "pfeiffer"))

    def sources(self) -> tuple[str, ...]:
        """Return the adapters; () once their methods are in `members`."""
        return () if self.members else self.adapters

    def with_sources(self, sources: Sequence[str]) -> AdapterFusion | None:
        """Return the fusion of these adapters; None if it names its own."""
        if self.adapters or self.members:
            return None
        return dataclasses.replace(self, adapters=tuple(sources))

    def built_from(
        self, sources: Sequence[TrainedSource]
    ) -> tuple[AdapterFusion, dict[str, Tensor]]:
        """Set the members, and return their tensors under the names of the fusion."""
        members = tuple(list(dump_methods(source.methods)) for source in sources)
        names = tuple(source.name for source in sources)
        tensors: dict[str, Tensor] = {}
        for number, source in enumerate(sources):
            for part in (part for method in source.methods for part in method.parts()):
                for name, tensor in source.tensors.items():
                    site, is_of_part, parameter = name.partition(f".{part.name}.")
                    if is_of_part:
                        tensors[f"{site}.{self.name}.members.{number}.{parameter}"] = tensor
        return dataclasses.replace(self, adapters=names, members=members), tensors

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one mix for each site of the members.

        Raises:
            ConfigError: fewer than two adapters.
            SiteError: adapters that cannot be mixed.
        """
        for site, modules in self._sites(anatomy):
            yield Placement(site, FusionLayer(modules, site.d_out))

    def count(self, anatomy: Anatomy) -> int:
        """Sum 3 d² + d over the sites."""
        with torch.random.fork_rng(devices=[]):
            sites = [site for site, _ in self._sites(anatomy)]
        return sum(3 * site.d_out**2 + site.d_out for site in sites)

    def _sites(self, anatomy: Anatomy) -> list[tuple[Site, list[OutputModule]]]:
        if len(self.members) < 2:
            raise ConfigError(
                f"{self.name} of {len(self.members)} adapters",
                expected="two or more trained adapters: names of attached adapters, or folders",
                hint=f"{self.name}(adapters=['runs/a', 'runs/b'])",
            )
        names = [repr(name) for name in self.adapters]
        names += [f"member {n}" for n in range(len(names), len(self.members))]
        named = list(zip(names, self.members, strict=False))
        modules = [_modules(member, name, anatomy) for name, member in named]
        first = modules[0]
        different = [
            name
            for (name, _), by_site in zip(named, modules, strict=True)
            if by_site.keys() != first.keys()
        ]
        if different:
            raise SiteError(
                f"adapters at other sites than {names[0]} cannot be mixed with it",
                offenders=different,
                expected=", ".join(sorted({anatomy.sites[site].role for site in first})),
            )
        return [(anatomy.sites[site], [by_site[site] for by_site in modules]) for site in first]


def _modules(member: Any, name: str, anatomy: Anatomy) -> dict[str, OutputModule]:
    """Build the modules of one member, by site id.

    Raises:
        SiteError: a module that does not map (x, y) to y', or two modules at one site.
    """
    modules: dict[str, OutputModule] = {}
    unsupported = set()
    for part in (part for method in parse_methods(member) for part in method.parts()):
        for step in part.plan(anatomy):
            if (
                isinstance(step, Placement)
                and _mixable(step.module)
                and step.site.id not in modules
            ):
                modules[step.site.id] = step.module
            else:
                unsupported.add(part.name)
    if unsupported:
        raise SiteError(
            f"the adapter {name} cannot be mixed with others",
            offenders=sorted(unsupported),
            expected="one method per site that changes the output of a projection or sublayer and "
            "reads only its input and output: houlsby, pfeiffer, parallel, compacter, lora",
        )
    return modules


def _mixable(module: SiteModule) -> TypeGuard[OutputModule]:
    if not isinstance(module, OutputModule) or module.token_sets:
        return False
    return not module.reads_weight and module.source not in STREAM

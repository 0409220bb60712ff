"""Sites and parameters selected by a method's options, and the base of methods at projections."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from adapterhub.anatomy.backbone import own_modules, parameter_at
from adapterhub.anatomy.sites import (
    ROUTER,
    Anatomy,
    Kind,
    Site,
    layer_numbers,
    matches,
    number_ranges,
    sites_option,
)
from adapterhub.backbones.weights import read_bias, read_weight
from adapterhub.config.options import option
from adapterhub.errors import ConfigError, SiteError
from adapterhub.methods.common.base import Layers, Method, Placement
from adapterhub.methods.common.site_module import SiteModule

WITH_OUTPUT: tuple[Kind, ...] = ("linear", "sublayer", "layer", "norm")
_WILDCARDS = frozenset("*?[")
_TOKENS = frozenset({"input_ids", "inputs_embeds"})
# Substitutes for a default role in a layer that lacks it; the first existing one is used.
_INSTEAD: Mapping[str, tuple[str, ...]] = {
    "attn.q": ("attn.q_b", "attn.qkv"),
    "attn.k": ("attn.kv_b", "attn.qkv"),
    "attn.v": ("attn.kv_b", "attn.qkv"),
    "ffn": ("mixer", "attn"),
    "attn": ("mixer", "ffn"),
}
# Substitutes for projections of attention in a layer without attention.
_MIXERS = ("mixer.*", "attn.*", "cross.*", "other.*")


class PartialSitesError(SiteError):
    """Default sites of a method that only some of the selected layers have.

    Attributes:
        found: patterns of the sites that were found.
    """

    found: tuple[str, ...] = ()


def select_sites(method: Any, anatomy: Anatomy, *kinds: Kind) -> tuple[Site, ...]:
    """Select the sites that a method's `sites` and `layers` options name.

    Sites named by the user must exist. In a layer that lacks a default site, its substitute is
    selected (`_INSTEAD`): the second projections of latent attention, a fused q, k and v or all of
    a mixer for a query, a mixer for a feed-forward network. Layers without attention use their
    networks, if other layers have attention or none has. Default sites may be absent, but each
    selected layer must have at least one. A pattern with wildcards selects sites of the kinds that
    the defaults have, if there are any: `attn.*` of a LoRA are the projections, not the norm.

    By default, only kinds with one output are selected.

    Raises:
        SiteError: a site does not exist, or the method does not support its kind; or some selected
            layers lack default sites.
    """
    default: Any = next(f.default for f in dataclasses.fields(method) if f.name == "sites")
    layers: Layers = getattr(method, "layers", "all")
    kinds = kinds or WITH_OUTPUT
    if method.sites == default:
        instead = _instead(anatomy, default, layers, kinds)
        sites = anatomy.select((*default, *instead), layers, strict=False)
        _refuse_partial(method, anatomy, sites, layers, kinds)
    else:
        sites = anatomy.select(method.sites, layers)
        sites = _without_other_kinds(sites, method.sites, anatomy, default)
    if unsupported := sorted({site.role for site in sites if site.kind not in kinds}):
        supported = sorted({s.role for s in anatomy.sites.values() if s.kind in kinds})
        raise SiteError(
            f"{method.name} does not support these sites",
            offenders=unsupported,
            expected=f"one of {', '.join(supported)}",
        )
    return sites


def _without_other_kinds(
    sites: tuple[Site, ...], patterns: Iterable[str], anatomy: Anatomy, default: Iterable[str]
) -> tuple[Site, ...]:
    """Drop sites selected by a wildcard whose kinds differ from the default sites.

    A pattern that selects only other kinds keeps these: `ffn.experts.*`.
    """
    usual = {s.kind for s in anatomy.sites.values() if any(matches(p, s) for p in default)}
    if not usual and any("." in pattern for pattern in default):  # as in XLNet without attn.q
        usual = {"linear"}
    meant: set[str] = set()
    selected = {site.id for site in sites}
    for pattern in patterns:
        matched = [site for site in anatomy.matching(pattern) if site.id in selected]
        plain = [site for site in matched if not usual or site.kind in usual]
        wild = _WILDCARDS.intersection(pattern)
        meant |= {site.id for site in (plain if wild and plain else matched)}
    return tuple(site for site in sites if site.id in meant)


def _instead(
    anatomy: Anatomy, default: Sequence[str], layers: Layers, kinds: Sequence[Kind]
) -> list[str]:
    """List the ids of the sites that replace default ones in layers without them."""
    names: list[str] = []
    empty: list[list[Site]] = []
    by_layer = _by_layer(anatomy, layers)
    for sites in by_layer.values():
        roles = {site.role for site in sites}
        own: list[str] = []
        for role in default:
            if role not in roles:
                kind: Kind = "linear" if "." in role else "sublayer"
                own += _first(_INSTEAD.get(role, ()), sites, {kind}.intersection(kinds))
        names += own
        empty += [] if own or roles & {*default} else [sites]
    if {"attn.q", "attn.k"} & {*default}:
        names += [name for sites in empty for name in _first(_MIXERS, sites, {"linear"})]
        some = len(empty) < len(by_layer) or bool(names)
        if some or not _has_attention(anatomy):  # layers with networks only
            names += [name for s in empty for name in _of_networks(s, names)]
    return names


def _has_attention(anatomy: Anatomy) -> bool:
    """Return whether layers have attention, including weights other than projections, as XLNet."""
    layers = (anatomy.model.get_submodule(p) for paths in anatomy.layers.values() for p in paths)
    return any("att" in path for layer in layers for path, _ in own_modules(layer))


def _of_networks(sites: Sequence[Site], names: Collection[str]) -> list[str]:
    """Return the ids of a layer's networks, if none of its sites was found."""
    if {site.id for site in sites}.intersection(names):
        return []
    networks = [site for site in sites if site.role != ROUTER]
    return _first(("ffn.*", "moe.*"), networks, {"linear"})


def _first(patterns: Iterable[str], sites: Sequence[Site], kinds: Collection[str]) -> list[str]:
    """Return the ids of the sites of some kinds that the first pattern with any of them matches."""
    able = [site for site in sites if site.kind in kinds]
    options = ([site.id for site in able if matches(pattern, site)] for pattern in patterns)
    return next(filter(None, options), [])


def _by_layer(anatomy: Anatomy, layers: Layers) -> dict[tuple[str, int], list[Site]]:
    """Map the selected layers to their sites."""
    by_layer: dict[tuple[str, int], list[Site]] = {
        (stack, number): []
        for stack in anatomy.stacks
        for number in layer_numbers(layers, anatomy.depth(stack))
    }
    for site in anatomy.sites.values():
        if site.layer is not None and (site.stack, site.layer) in by_layer:
            by_layer[site.stack, site.layer].append(site)
    return by_layer


def _refuse_partial(
    method: Any, anatomy: Anatomy, sites: Sequence[Site], layers: Layers, kinds: Sequence[Kind]
) -> None:
    """Refuse default sites that leave some layers unchanged.

    Keys and values are needed only in layers with attention.
    """
    covered = {(site.stack, site.layer) for site in sites if site.layer is not None}
    by_layer = _by_layer(anatomy, layers)
    needed = {key for key, own in by_layer.items() if "keyvalue" not in kinds or _attends(own)}
    if not covered or needed <= covered:
        return
    numbers = {
        stack: sorted(n for s, n in by_layer if s == stack and (s, n) in covered)
        for stack in dict.fromkeys(stack for stack, _ in by_layer)
    }
    roles = dict.fromkeys(f"{site.stack}.{site.role}" for site in sites if site.layer is not None)
    everywhere = set.intersection(*map(set, numbers.values()))
    common = f"layers={sorted(everywhere)}, or " if everywhere else ""
    error = PartialSitesError(
        f"not all layers have the sites of {method.name}",
        offenders=[
            f"{stack}: {len(some)} of {anatomy.depth(stack)} layers have some "
            f"({number_ranges(some) or 'none'})"
            for stack, some in numbers.items()
            if {(stack, n) for n in range(anatomy.depth(stack))} & needed - covered
        ],
        expected=f"layers that have some; to adapt only what is there, name layers or sites: "
        f"{common}sites=[{', '.join(map(repr, roles))}]",
        hint="attach(..., partial=True), or partial=true in a recipe, which names the sites found",
    )
    matched = sites_option(anatomy, sites)
    # With the names of the defaults, they would be refused again.
    by_stack = sorted({f"{site.stack}.{site.role}" for site in sites})
    error.found = tuple(by_stack if set(matched) == set(method.sites) else matched)
    raise error


def _attends(sites: Iterable[Site]) -> bool:
    return any(s.kind == "linear" and s.role.startswith(("attn.", "cross.")) for s in sites)


def require_stream(method: Method, source: str, sites: Iterable[Site]) -> None:
    """Refuse sites without a known residual stream.

    Raises:
        SiteError: lists the roles of these sites.
    """
    if roles := sorted({site.role for site in sites if site.stream is None}):
        raise SiteError(
            f"{method.name} cannot read the {source} at these sites: their position in the "
            "residual stream is unknown",
            offenders=roles,
            expected="sublayers of an architecture whose family row names its norms",
        )


def of_texts(method: Any, anatomy: Anatomy, sites: Sequence[Site]) -> tuple[Site, ...]:
    """Return the sites of stacks that read text, where tokens have places.

    Default sites of other stacks are omitted; the user may not name them.

    Raises:
        SiteError: lists stacks that do not read text.
    """
    default: Any = next(f.default for f in dataclasses.fields(method) if f.name == "sites")
    reading = {name for name in anatomy.stacks if _reads_text(anatomy, name)}
    own = tuple(site for site in sites if site.reads in reading)
    if not own or (len(own) < len(sites) and method.sites != default):
        raise SiteError(
            f"{method.name} changes some tokens of a text, and these stacks do not read text",
            offenders=sorted({site.reads for site in sites} - reading),
            expected="stacks that are called with tokens and an attention_mask",
            hint="sites of a decoder, or a method that changes all tokens, such as lora",
        )
    return own


def _reads_text(anatomy: Anatomy, stack: str) -> bool:
    """Return whether only this stack is called with tokens and their mask."""
    root = anatomy.stacks[stack].root
    module = anatomy.model.get_submodule(anatomy.path(root))
    taken = inspect.signature(module.forward).parameters.keys()
    alone = [each.root for each in anatomy.stacks.values()].count(root) == 1
    return alone and "attention_mask" in taken and bool(taken & _TOKENS)


def sizes_by_site(
    option: str, sites: Sequence[Site], default: int, sizes: Mapping[str, int]
) -> dict[Site, int]:
    """Return the rank or size of each site, from the most specific pattern or the default.

    Patterns have the form of `sites` options. A pattern without wildcards is more specific than one
    with wildcards; otherwise the longer one is: a site id (`encoder.0.attn.q`), then a role of a
    stack (`encoder.attn.q`), then a role (`attn.q`). The order of `sizes` does not matter, since
    files do not preserve it.

    `option` is `rank` or `size`; `sizes` has the sizes by pattern.

    Raises:
        ConfigError: a size below 1.
        SiteError: a pattern does not match any site.
    """
    _check_sizes(option, sites, default, sizes)
    by_site = {}
    for site in sites:
        patterns = [pattern for pattern in sizes if matches(pattern, site)]
        by_site[site] = sizes[max(patterns, key=_specificity)] if patterns else default
    return by_site


def _check_sizes(
    option: str, sites: Sequence[Site], default: int, sizes: Mapping[str, int]
) -> None:
    values = {option: default, **sizes}
    if too_small := [f"{name}: {value}" for name, value in values.items() if value < 1]:
        raise ConfigError(
            f"{option} cannot be less than 1", offenders=too_small, expected="1 or more"
        )
    if unused := [p for p in sizes if not any(matches(p, site) for site in sites)]:
        raise SiteError(
            f"{option}s names sites that the method does not adapt",
            offenders=[repr(pattern) for pattern in unused],
            expected=f"patterns of {', '.join(sorted({site.role for site in sites}))}",
        )


def _specificity(pattern: str) -> tuple[bool, int, str]:
    """Return a sort key; the last item makes it independent of the order of the patterns."""
    return not _WILDCARDS.intersection(pattern), len(pattern), pattern


def in_layers(
    anatomy: Anatomy, paths: Iterable[str], layers: Layers, outside: bool | None = None
) -> list[str]:
    """Select the backbone parameters in some layers.

    `outside`: also parameters outside all layers; by default if `layers` is all.

    Raises:
        SiteError: an invalid selection, or a layer that does not exist.
    """
    outside = layers == "all" if outside is None else outside
    numbers = {stack: layer_numbers(layers, anatomy.depth(stack)) for stack in anatomy.layers}

    def selected(path: str) -> bool:
        layer = anatomy.layer_of(path)
        if isinstance(layer, str):  # below or above the layers
            return outside
        stack, number = layer
        return number in numbers[stack]

    return [path for path in paths if selected(path)]


ATTENTION = ("attn.q", "attn.v", "cross.q", "cross.v")


def weight_at(site: Site, anatomy: Anatomy) -> Tensor:
    """Return the weight of a projection, (d_out, d_in), in fp32.

    Raises:
        SiteError: the weight cannot be read.
    """
    host = anatomy.model.get_submodule(site.host)
    if site.matrix is not None:
        return site.matrix.of(host.get_parameter(site.matrix.weight)).detach().float()
    return read_weight(host, site.part).detach()


def bias_at(site: Site, anatomy: Anatomy) -> Tensor | None:
    """Return the bias of a projection, (d_out,), as stored; None if missing."""
    host, matrix = anatomy.model.get_submodule(site.host), site.matrix
    if matrix is None:
        return read_bias(host, site.part)
    bias = parameter_at(host, matrix.bias)
    return None if bias is None else matrix.bias_of(bias)


def has_bias(site: Site, anatomy: Anatomy) -> bool:
    """Return whether a projection has a bias."""
    return bias_at(site, anatomy) is not None


def divisor(size: int, most: int) -> int:
    """Return the largest number up to `most` that divides a size."""
    return next(n for n in range(min(most, size), 0, -1) if size % n == 0)


@dataclass(frozen=True)
class ProjectionMethod(Method):
    """One module at each selected projection; a subclass has `module` and `size`.

    Attributes:
        kinds: the kinds of supported sites.
    """

    kinds: ClassVar[tuple[Kind, ...]] = ("linear",)

    sites: tuple[str, ...] = option(ATTENTION, "projections to adapt")
    layers: Layers = option("all", "layers to adapt: all, 'top 4', '0..3', [0, 5]")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one module per selected projection.

        Raises:
            SiteError: a site that is not a projection, or that the module does not fit.
        """
        for site, rank in self.ranks_by_site(anatomy).items():
            yield Placement(site, self.module(site, rank, anatomy))

    def count(self, anatomy: Anatomy) -> int:
        """Sum the numbers of the sites."""
        return sum(self.size(*each) for each in self.ranks_by_site(anatomy).items())

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> SiteModule:
        """Return the module of one site; the rank is 0 for a method without ranks."""
        raise NotImplementedError(f"{self.name} has no module")

    def size(self, site: Site, rank: int) -> int:
        """Return the number of trained values at one site."""
        raise NotImplementedError(f"{self.name} has no size")

    def ranks_by_site(self, anatomy: Anatomy) -> Mapping[Site, int]:
        """Return the rank of each selected site."""
        return dict.fromkeys(select_sites(self, anatomy, *self.kinds), 0)


@dataclass(frozen=True)
class RankOption:
    """The option of a rank; the options of the last base come first."""

    rank: int = option(8, "rank r of the update", least=1)


@dataclass(frozen=True)
class _Ranks(RankOption):
    ranks: dict[str, int] = option({}, "other ranks for some sites: {attn.q: 4}")


@dataclass(frozen=True)
class RankMethod(ProjectionMethod, _Ranks):
    """One module of some rank at each selected projection."""

    sized_by: ClassVar[str | None] = "rank"

    def ranks_by_site(self, anatomy: Anatomy) -> Mapping[Site, int]:
        """Return the rank of each selected site."""
        sites = select_sites(self, anatomy, *self.kinds)
        return sizes_by_site("rank", sites, self.rank, self.ranks)


def require_components(method: Method, site: Site, rank: int) -> None:
    """Refuse a rank that exceeds the components of a weight.

    Raises:
        SiteError: the rank is too large.
    """
    most = min(site.d_in, site.d_out)
    if rank > most:
        raise SiteError(
            f"{method.name} needs {rank} components of the weight at {site.id}",
            expected=f"a rank of at most {most}",
            hint=f"{method.name}(rank={most})",
        )

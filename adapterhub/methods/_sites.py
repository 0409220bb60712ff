"""Find the sites and parameters of a backbone that a method's options name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from adapterhub.anatomy.layer_selection import layer_numbers, number_ranges
from adapterhub.anatomy.sites import Anatomy, Kind, Site, matches
from adapterhub.errors import ConfigError, SiteError
from adapterhub.methods._base import Layers, Method

_WITH_OUTPUT: tuple[Kind, ...] = ("linear", "sublayer", "norm")
_WILDCARDS = frozenset("*?[")


def select_sites(method: Any, anatomy: Anatomy, *kinds: Kind) -> tuple[Site, ...]:
    """Select the sites that a method's `sites` and `layers` options name.

    Sites that the user named must exist. Default sites may be absent from a backbone, but not from
    some of the selected layers only. A pattern with wildcards selects sites of the kinds that the
    defaults have: `attn.*` of a LoRA are the projections, not the norm.

    Args:
        method: a method with these options.
        anatomy: the anatomy of the backbone.
        kinds: the kinds of site that the method supports; by default those with one output.

    Raises:
        SiteError: a site that does not exist, or whose kind the method does not support; default
            sites that only some of the selected layers have.
    """
    default: Any = next(f.default for f in dataclasses.fields(method) if f.name == "sites")
    layers: Layers = getattr(method, "layers", "all")
    sites = anatomy.select(method.sites, layers, strict=method.sites != default)
    sites = _without_other_kinds(sites, method.sites, anatomy, default)
    kinds = kinds or _WITH_OUTPUT
    if method.sites == default:
        _refuse_partial(method, anatomy, sites, layers)
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
    """Leave out what only wildcards select, and is of another kind than the default sites.

    If nothing remains, all are returned, for the error to name.
    """
    usual = {s.kind for s in anatomy.sites.values() if any(matches(p, s) for p in default)}
    named = [pattern for pattern in patterns if not _WILDCARDS.intersection(pattern)]
    meant = tuple(
        s for s in sites if not usual or s.kind in usual or any(matches(p, s) for p in named)
    )
    return meant or sites


def _refuse_partial(method: Any, anatomy: Anatomy, sites: Iterable[Site], layers: Layers) -> None:
    """Refuse default sites that some layers lack: layers of another kind would stay as they are."""
    found: dict[tuple[str, str], set[int]] = {}
    for site in sites:
        if site.layer is not None:
            found.setdefault((site.stack, site.role), set()).add(site.layer)
    selected = {s: set(layer_numbers(layers, anatomy.depth(s))) for s in anatomy.stacks}
    for role in {role for _, role in found if not role.startswith("cross")}:
        for stack in anatomy.stacks:
            found.setdefault((stack, role), set())
    partial = {key: some for key, some in found.items() if some < selected[key[0]]}
    if not partial:
        return
    everywhere = set.intersection(*found.values())
    common = f"layers={sorted(everywhere)}, or " if everywhere else ""
    named = ", ".join(f"'{stack}.{role}'" for stack, role in found if found[stack, role])
    raise SiteError(
        f"not all layers have the sites of {method.name}",
        offenders=[
            f"{stack}.{role}: in {len(some)} of {len(selected[stack])} layers"
            f" ({number_ranges(some) or 'none'})"
            for (stack, role), some in sorted(partial.items())
        ],
        expected=f"layers that have them all; to adapt only what is there, name layers or sites: "
        f"{common}sites=[{named}]",
    )


def require_stream(method: Method, source: str, sites: Iterable[Site]) -> None:
    """Refuse sites without a known residual stream.

    Args:
        method: a method that reads the residual stream.
        source: its option `source`, for the message.
        sites: the sites that it adapts.

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


def sizes_by_site(
    option: str, sites: Sequence[Site], default: int, sizes: Mapping[str, int]
) -> dict[Site, int]:
    """Return the rank or size of each site: that of the most specific pattern, or the default.

    Patterns are those of `sites` options. A pattern without wildcards is more specific than one
    with wildcards; otherwise the longer one is: a site id (`encoder.0.attn.q`), then a role of a
    stack (`encoder.attn.q`), then a role (`attn.q`). The order of `sizes` does not matter, since
    files do not preserve it.

    Args:
        option: the name of the option of the default, `rank` or `size`.
        sites: the sites that the method adapts.
        default: the size of sites that no pattern matches.
        sizes: sizes by pattern.

    Raises:
        ConfigError: a size below 1.
        SiteError: a pattern that matches none of the sites.
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
    """Select the backbone parameters that are in some layers.

    Args:
        anatomy: the anatomy of the backbone.
        paths: the paths of parameters.
        layers: the layers.
        outside: whether to select those outside of all layers too; by default if `layers` is all.

    Raises:
        SiteError: an invalid selection, or a layer that does not exist.
    """
    outside = layers == "all" if outside is None else outside
    numbers = {stack: layer_numbers(layers, anatomy.depth(stack)) for stack in anatomy.stacks}

    def selected(path: str) -> bool:
        layer = anatomy.layer_of(path)
        if isinstance(layer, str):  # below or above the layers
            return outside
        stack, number = layer
        return number in numbers[stack]

    return [path for path in paths if selected(path)]

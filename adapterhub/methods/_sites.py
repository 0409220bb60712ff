"""Which sites and parameters of a backbone a method's options name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from adapterhub.anatomy.layer_selection import layer_numbers
from adapterhub.anatomy.sites import Anatomy, Kind, Site, matches
from adapterhub.errors import ConfigError, SiteError
from adapterhub.methods._base import Layers, Method


def select_sites(method: Any, anatomy: Anatomy, *kinds: Kind) -> tuple[Site, ...]:
    """The sites that a method's `sites` and `layers` options name.

    A site that the user typed must be there; of the defaults, those that the backbone has.

    Raises:
        SiteError: a site that is not there, or of another kind than the method can use.
    """
    default = next(f.default for f in dataclasses.fields(method) if f.name == "sites")
    chosen = anatomy.select(method.sites, method.layers, strict=method.sites != default)
    if wrong := sorted({site.role for site in chosen if kinds and site.kind not in kinds}):
        fitting = sorted({s.role for s in anatomy.sites.values() if s.kind in kinds})
        raise SiteError(
            f"{method.name} cannot sit at these sites",
            offenders=wrong,
            expected=f"one of {', '.join(fitting)}",
        )
    return chosen


def require_stream(method: Method, reads: str, sites: Iterable[Site]) -> None:
    """Refuse sites without a known residual stream, for a method that reads it.

    Raises:
        SiteError: which they are.
    """
    if wrong := sorted({site.role for site in sites if site.stream is None}):
        raise SiteError(
            f"{method.name} cannot read the {reads} at these sites: where the residual stream "
            "meets them is not known",
            offenders=wrong,
            expected="sublayers of an architecture whose row names its norms",
        )


def sizes_by_site(
    option: str, sites: Sequence[Site], size: int, sizes: Mapping[str, int]
) -> list[tuple[Site, int]]:
    """The rank or size of each site: that of the closest pattern in `sizes`, else `size`.

    Patterns are those of `sites` options. Of several that name a site, one without wildcards is
    closer, then a longer one: a site id, a stack's role (`encoder.attn.q`), a role (`attn.q`). The
    order of a mapping decides nothing, for files do not keep it.

    Raises:
        ConfigError: a size below 1. SiteError: a pattern that names none of the sites.
    """
    if wrong := [f"{k}: {v}" for k, v in {option: size, **sizes}.items() if v < 1]:
        raise ConfigError(f"{option} cannot be less than 1", offenders=wrong, expected="1 or more")
    if idle := [p for p in sizes if not any(matches(p, site) for site in sites)]:
        raise SiteError(
            f"{option}s names sites that the method does not adapt",
            offenders=[repr(p) for p in idle],
            expected=f"patterns of {', '.join(sorted({site.role for site in sites}))}",
        )

    def closest(site: Site) -> int:
        named = [p for p in sizes if matches(p, site)]
        best = max(named, key=lambda p: (not set(p) & set("*?["), len(p), p), default=None)
        return size if best is None else sizes[best]

    return [(site, closest(site)) for site in sites]


def in_layers(
    anatomy: Anatomy, paths: Iterable[str], layers: Layers, outside: bool | None = None
) -> list[str]:
    """Of these backbone parameters, those in the chosen layers; with `outside` those that stand
    outside all layers too. By default they are in where all layers are.

    Raises:
        SiteError: a selection that cannot be read, or a layer that is not there.
    """
    outside = layers == "all" if outside is None else outside
    numbers = {stack: layer_numbers(layers, anatomy.depth(stack)) for stack in anatomy.stacks}

    def chosen(path: str) -> bool:
        place = anatomy.layer_of(path)
        return outside if isinstance(place, str) else place[1] in numbers[place[0]]

    return [path for path in paths if chosen(path)]

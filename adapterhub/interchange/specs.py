"""The options of a method that name given sites, as a person would write them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from adapterhub.anatomy.sites import Anatomy, Site


def sites_option(anatomy: Anatomy, chosen: Iterable[Site]) -> list[str]:
    """Patterns that name exactly these sites: roles, roles of a stack, or else ids."""
    ids = {site.id for site in chosen}
    for name in (lambda s: s.role, lambda s: f"{s.stack}.{s.role}"):
        named = sorted({name(s) for s in anatomy.sites.values() if s.id in ids})
        if {s.id for s in anatomy.sites.values() if name(s) in named} == ids:
            return named
    return [s.id for s in anatomy.sites.values() if s.id in ids]


def ranks_options(ranks: Mapping[str, int]) -> dict[str, Any]:
    """The options `rank` and `ranks` for a rank at each site id."""
    (common, _), *_ = Counter(ranks.values()).most_common(1)
    return {"rank": common, "ranks": {i: r for i, r in sorted(ranks.items()) if r != common}}

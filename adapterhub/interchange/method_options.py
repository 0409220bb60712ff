"""Method options for a given set of sites, in the short form that a person would write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from adapterhub.anatomy.sites import Anatomy, Site


def sites_option(anatomy: Anatomy, sites: Iterable[Site]) -> list[str]:
    """Return patterns that match exactly these sites: roles, stack-qualified roles, or ids."""
    ids = {site.id for site in sites}
    for name_and_revision in (lambda s: s.role, lambda s: f"{s.stack}.{s.role}"):
        names = sorted({name_and_revision(s) for s in anatomy.sites.values() if s.id in ids})
        if {s.id for s in anatomy.sites.values() if name_and_revision(s) in names} == ids:
            return names
    return [s.id for s in anatomy.sites.values() if s.id in ids]


def size_options(option: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the options for one size per site id, such as `rank` and `ranks`.

    `option` is the most common size; its plural maps the other sites' ids to their sizes.
    """
    (common, _), *_ = Counter(sizes.values()).most_common(1)
    others = {site_id: size for site_id, size in sorted(sizes.items()) if size != common}
    return {option: common, f"{option}s": others}

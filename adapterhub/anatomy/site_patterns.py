"""The shortest patterns that select exactly some sites, as a person would write them."""

from __future__ import annotations

from collections.abc import Iterable

from adapterhub.anatomy.sites import Anatomy, Site


def sites_option(anatomy: Anatomy, sites: Iterable[Site]) -> list[str]:
    """Return patterns that match exactly these sites: roles, stack-qualified roles, or ids."""
    ids = {site.id for site in sites}
    for name in (lambda s: s.role, lambda s: f"{s.stack}.{s.role}"):
        names = sorted({name(s) for s in anatomy.sites.values() if s.id in ids})
        if {s.id for s in anatomy.sites.values() if name(s) in names} == ids:
            return names
    return [s.id for s in anatomy.sites.values() if s.id in ids]

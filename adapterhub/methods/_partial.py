"""Methods for a backbone some of whose layers have none of their default sites.

Such a method is refused: half of a model adapted is rarely what is meant. Where it is, the sites
that were found are named in the method's options, so that its files say what it adapts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from adapterhub.anatomy.sites import Anatomy
from adapterhub.methods._base import METHODS, Method
from adapterhub.methods._sites import PartialSitesError


def with_found_sites(methods: Sequence[Method], anatomy: Anatomy) -> tuple[Method, ...]:
    """Return methods that name the sites that were found, where some layers have none.

    Args:
        methods: parsed methods.
        anatomy: the anatomy of the backbone.

    Returns:
        The methods; in place of a composition of which a part is such a method, its parts, if
        these can be written in a file on their own.
    """
    found: list[Method] = []
    for method in methods:
        parts = method.parts()
        named = tuple(_with_found(part, anatomy) for part in parts)
        whole = named == parts or any(METHODS.get(p.name) is not type(p) for p in named)
        found += [method] if whole else named
    return tuple(found)


def _with_found(method: Any, anatomy: Anatomy) -> Method:
    try:
        method.count(anatomy)
    except PartialSitesError as error:
        return replace(method, sites=error.found)  # type: ignore[no-any-return]
    return method  # type: ignore[no-any-return]

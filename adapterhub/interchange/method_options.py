"""Method options for a given set of sites, in the short form that a person would write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


def size_options(option: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the options for one size per site id, such as `rank` and `ranks`.

    `option` is the most common size; its plural maps the other sites' ids to their sizes.
    """
    (common, _), *_ = Counter(sizes.values()).most_common(1)
    others = {site_id: size for site_id, size in sorted(sizes.items()) if size != common}
    return {option: common, f"{option}s": others}

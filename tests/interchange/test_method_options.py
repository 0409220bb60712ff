"""Sizes of sites as options: the most common one, and the others."""

from __future__ import annotations

from adapterhub.interchange.translation import size_options


def test_the_most_common_size_is_the_default():
    assert size_options("rank", {"a": 8, "b": 4, "c": 8}) == {"rank": 8, "ranks": {"b": 4}}
    assert size_options("size", {"a": 3}) == {"size": 3, "sizes": {}}

"""Patterns of a set of sites are exact and short."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from adapterhub.anatomy.build import anatomy_of
from adapterhub.anatomy.sites import sites_option
from tests.kit import tiny_models

T5 = anatomy_of(tiny_models.model("t5", "seq2seq"))


def test_the_shortest_exact_patterns_are_used(subtests):
    cases = [
        (lambda s: s.role == "attn.q", ["attn.q"]),
        (lambda s: s.role in ("attn.q", "attn.v"), ["attn.q", "attn.v"]),
        (lambda s: s.role == "attn.q" and s.stack == "decoder", ["decoder.attn.q"]),
        (lambda s: s.id == "decoder.0.attn.q", ["decoder.0.attn.q"]),
        (lambda s: False, []),
    ]
    for names, option in cases:
        with subtests.test(names=names):
            assert sites_option(T5, [site for site in T5.sites.values() if names(site)]) == option


@given(st.sets(st.sampled_from(sorted(T5.sites)), min_size=1))
def test_the_patterns_select_exactly_the_sites(ids):
    patterns = sites_option(T5, [T5.sites[i] for i in ids])
    assert {site.id for site in T5.select(patterns)} == ids

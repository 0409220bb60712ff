"""Ranks and widths by site: the most specific pattern applies."""

from __future__ import annotations

import pytest

import adapterhub as ah
from adapterhub.errors import ConfigError, SiteError
from tests.kit import tiny_models


def ranks_by_site(architecture, spec):
    adapter = ah.attach(tiny_models.model(architecture), spec)
    assert adapter.count() == sum(m.count(adapter.anatomy) for m in adapter.methods)
    return {p.site.id: p.module.A.shape[0] for p in adapter.placed}


@pytest.mark.parametrize("method", ["lora", "rslora", "lora-plus"])
def test_the_most_specific_pattern_applies_in_any_order(method):
    sizes = {"*": 7, "attn.q": 4, "encoder.attn.q": 3, "encoder.1.attn.q": 2}
    for pairs in (sizes.items(), reversed(sizes.items())):
        ranks = ranks_by_site("bart", {method: {"ranks": dict(pairs)}})
        assert ranks["encoder.0.attn.q"] == 3
        assert ranks["encoder.1.attn.q"] == 2
        assert ranks["decoder.0.attn.q"] == 4
        assert ranks["decoder.1.cross.v"] == 7


def test_slices_of_a_fused_projection_have_their_own_ranks():
    ranks = ranks_by_site("gpt2", {"lora": {"rank": 5, "ranks": {"attn.q": 1}}})
    assert ranks == {f"decoder.{n}.attn.{p}": r for n in (0, 1) for p, r in (("q", 1), ("v", 5))}


def test_bottlenecks_have_widths_by_site():
    adapter = ah.attach(tiny_models.model("bert"), {"houlsby": {"size": 8, "sizes": {"attn": 3}}})
    sizes = {p.site.id: p.module.down.out_features for p in adapter.placed}
    assert sizes == {f"encoder.{n}.{s}": w for n in (0, 1) for s, w in (("attn", 3), ("ffn", 8))}
    assert adapter.count() == adapter.methods[0].count(adapter.anatomy)


def test_a_pattern_without_a_site_is_refused():
    with pytest.raises(SiteError, match="ranks names sites") as error:
        ah.attach(tiny_models.model("bert"), {"lora": {"ranks": {"attn.k": 4, "attn.q": 2}}})
    assert error.value.offenders == ("'attn.k'",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank: 0, must be at least 1"),
        ({"ranks": {"attn.q": -1}}, "rank cannot be less than 1"),
    ],
)
def test_a_rank_below_one_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ah.attach(tiny_models.model("bert"), {"lora": options})

"""Ranks and sizes that differ by site, and learning rates that differ by parameter."""

from __future__ import annotations

import pytest
import tiny_models

import adapterhub as ah
from adapterhub.errors import ConfigError, SiteError
from adapterhub.methods._spec import dump_methods, parse_methods
from adapterhub.training.options import TrainOptions
from adapterhub.training.trainee import AdapterTrainee


def ranks(architecture, spec):
    adapter = ah.attach(tiny_models.model(architecture), spec)
    assert adapter.count() == sum(m.count(adapter.anatomy) for m in adapter.methods)
    return {p.site.id: p.module.A.shape[0] for p in adapter.placed}


@pytest.mark.parametrize("method", ["lora", "rslora", "lora-plus"])
def test_the_closest_pattern_decides_whatever_the_order(method):
    sizes = {"*": 7, "attn.q": 4, "encoder.attn.q": 3, "encoder.1.attn.q": 2}
    for pairs in (sizes.items(), reversed(sizes.items())):
        found = ranks("bart", {method: {"ranks": dict(pairs)}})
        assert found["encoder.0.attn.q"] == 3
        assert found["encoder.1.attn.q"] == 2
        assert found["decoder.0.attn.q"] == 4
        assert found["decoder.1.cross.v"] == 7


def test_ranks_of_parts_of_a_fused_projection():
    found = ranks("gpt2", {"lora": {"rank": 5, "ranks": {"attn.q": 1}}})
    assert found == {f"decoder.{n}.attn.{p}": r for n in (0, 1) for p, r in (("q", 1), ("v", 5))}


def test_widths_of_bottlenecks():
    adapter = ah.attach(tiny_models.model("bert"), {"houlsby": {"size": 8, "sizes": {"attn": 3}}})
    sizes = {p.site.id: p.module.down.out_features for p in adapter.placed}
    assert sizes == {f"encoder.{n}.{s}": w for n in (0, 1) for s, w in (("attn", 3), ("ffn", 8))}
    assert adapter.count() == adapter.methods[0].count(adapter.anatomy)


def test_the_text_form_and_the_normal_form_agree():
    (method,) = parse_methods("lora(rank=2, ranks={'attn.q': 4})")
    assert method.ranks == {"attn.q": 4}
    assert parse_methods(dump_methods([method])) == (method,)
    assert parse_methods("lora")[0].ranks == {}
    assert parse_methods("lora")[0].ranks is not parse_methods("lora")[0].ranks


def test_ranks_are_saved(tmp_path):
    spec = {"lora": {"ranks": {"*": 2, "attn.q": 4, "encoder.0.attn.v": 3}}}
    adapter = ah.attach(tiny_models.model("bert"), spec)
    adapter.save(tmp_path / "adapter")
    loaded = ah.load(tiny_models.model("bert"), tmp_path / "adapter")
    assert loaded.methods == adapter.methods
    assert {n: t.shape for n, t in loaded.tensors().items()} == {
        n: t.shape for n, t in adapter.tensors().items()
    }


def test_a_pattern_that_names_nothing_is_refused():
    with pytest.raises(SiteError, match="ranks names sites") as error:
        ah.attach(tiny_models.model("bert"), {"lora": {"ranks": {"attn.k": 4, "attn.q": 2}}})
    assert error.value.offenders == ("'attn.k'",)


@pytest.mark.parametrize("options", [{"rank": 0}, {"ranks": {"attn.q": -1}}])
def test_a_rank_below_one_is_refused(options):
    with pytest.raises(ConfigError, match="rank cannot be less than 1"):
        ah.attach(tiny_models.model("bert"), {"lora": options})


def test_b_learns_faster():
    adapter = ah.attach(tiny_models.model("bert"), "lora-plus(ratio=8)")
    groups = AdapterTrainee(adapter).param_groups(TrainOptions(learning_rate=1e-3))
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert len(rates) == len(adapter.parameters())
    for placed in adapter.placed:
        assert rates[id(placed.module.A)] == 1e-3
        assert rates[id(placed.module.B)] == 8e-3
    assert len({group["name"] for group in groups}) == len(groups) == 3


def test_a_reparametrized_prefix_learns_slower():
    def rate(spec):
        adapter = ah.attach(tiny_models.model("bert"), spec)
        (group,) = (
            g for g in AdapterTrainee(adapter).param_groups(TrainOptions()) if g["name"] != "head"
        )
        return group["lr"]

    assert rate("prefix(reparametrize=true, middle=4)") == pytest.approx(0.1 * rate("prefix"))

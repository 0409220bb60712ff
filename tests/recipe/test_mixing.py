"""The share of the steps of each of several tasks."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.errors import ConfigError
from adapterhub.recipe.recipe import (
    MIXINGS,
    ByTemperature,
    TaskOptions,
    check_task_names,
    draw_tasks,
    dump_mixing,
    mixture_shares,
    parse_mixing,
)

SIZES = st.lists(st.integers(1, 10**7), min_size=1, max_size=8).map(
    lambda sizes: {f"t{n}": size for n, size in enumerate(sizes)}
)
MIXES = st.sampled_from(["size", "size(limit=100)", "equal", "temperature(t=3.5)",
                         "temperature(t=2, limit=1000)"])  # fmt: skip


@given(SIZES, MIXES)
def test_shares_add_up_and_keep_the_order_of_sizes(sizes, spec):
    shares = mixture_shares(parse_mixing(spec), sizes)
    assert list(shares) == list(sizes)
    assert math.isclose(sum(shares.values()), 1)
    assert all(share > 0 for share in shares.values())
    ordered = sorted(sizes, key=sizes.__getitem__)
    for small, large in itertools.pairwise(ordered):
        assert shares[small] <= shares[large] * (1 + 1e-12)


@given(SIZES, st.integers(1, 10**6))
def test_temperatures_lie_between_size_and_equal(sizes, limit):
    """Raffel et al. 2020, section 3.5.2: T = 1 is proportional, a large T is equal."""
    by_size = mixture_shares(parse_mixing({"size": {"limit": limit}}), sizes)
    cold = mixture_shares(ByTemperature(t=1, limit=limit), sizes)
    hot = mixture_shares(ByTemperature(t=1e9, limit=limit), sizes)
    equal = mixture_shares(parse_mixing("equal"), sizes)
    for name in sizes:
        assert math.isclose(cold[name], by_size[name])
        assert math.isclose(hot[name], equal[name], rel_tol=1e-6)
        warm = mixture_shares(ByTemperature(t=2, limit=limit), sizes)
        spread = [max(each.values()) - min(each.values()) for each in (by_size, warm, equal)]
        assert spread[0] >= spread[1] - 1e-12 >= spread[2] - 2e-12


def test_size_counts_at_most_the_limit():
    assert mixture_shares(parse_mixing("size(limit=10)"), {"a": 10, "b": 30}) == {
        "a": 0.5,
        "b": 0.5,
    }
    assert mixture_shares(parse_mixing("size"), {"a": 10, "b": 30}) == {"a": 0.25, "b": 0.75}


@given(SIZES, MIXES, st.integers(0, 9), st.integers(0, 9))
def test_draws_depend_on_seed_and_epoch_alone_and_follow_the_shares(sizes, spec, seed, epoch):
    shares = list(mixture_shares(parse_mixing(spec), sizes).values())
    drawn = draw_tasks(shares, 400, seed, epoch)
    assert drawn == draw_tasks(shares, 400, seed, epoch)
    assert set(drawn) <= set(range(len(shares)))
    for number, share in enumerate(shares):
        deviation = 6 * math.sqrt(400 * share * (1 - share)) + 1
        assert abs(drawn.count(number) - 400 * share) <= deviation
    if len(shares) > 1 and min(shares) > 0.05:
        assert drawn != draw_tasks(shares, 400, seed + 1, epoch)
        assert drawn != draw_tasks(shares, 400, seed, epoch + 1)


@pytest.mark.parametrize("name", sorted(MIXINGS))
def test_a_mixing_round_trips(name):
    mixing = parse_mixing(name)
    assert parse_mixing(dump_mixing(mixing)) == mixing


@pytest.mark.parametrize(
    ("spec", "match"),
    [("temprature", "temperature"), ("temperature(t=0.5)", "from 1"), ("size(limit=0)", "from 1"),
     ("size(limt=4)", "limit"), ("size, equal", "invalid mixing spec"), (3, "invalid mixing spec"),
     ({"size": 4}, "invalid mixing spec"), ({"size": {}, "equal": {}}, "invalid mixing spec")],
)  # fmt: skip
def test_a_wrong_mixing_is_refused(spec, match):
    with pytest.raises(ConfigError) as error:
        parse_mixing(spec)
    assert match in str(error.value)


def test_names_and_weights_are_checked():
    check_task_names(["rte", "a-2", "9_x"])
    with pytest.raises(ConfigError) as error:
        check_task_names(["rte", "a.b", "", "x/y", "é"])
    assert len(error.value.offenders) == 4
    with pytest.raises(ConfigError, match="weight"):
        TaskOptions(weight=0)

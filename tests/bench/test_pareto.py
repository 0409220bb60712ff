"""The Pareto front: by hand, and its definition on random points."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from adapterhub.bench.pareto import ParetoPoint, dominators, pareto_front

numbers = st.integers(0, 4).map(float)
point_lists = st.lists(st.tuples(numbers, numbers), max_size=8).map(
    lambda pairs: [ParetoPoint(f"m{i}", *pair) for i, pair in enumerate(pairs)]
)


def beats(one, other):
    no_worse = one.score >= other.score and one.cost <= other.cost
    return no_worse and (one.score, one.cost) != (other.score, other.cost)


def test_a_front_by_hand():
    points = [
        ParetoPoint("full", 0.9, 1000),
        ParetoPoint("lora", 0.9, 10),
        ParetoPoint("head", 0.7, 1),
        ParetoPoint("prompt", 0.6, 5),
        ParetoPoint("other head", 0.7, 1),
    ]
    assert dominators(points) == {
        "full": "lora", "lora": None, "head": None, "prompt": "head", "other head": None
    }  # fmt: skip
    assert [p.method for p in pareto_front(points)] == ["head", "other head", "lora"]
    losses = [ParetoPoint(p.method, -p.score, p.cost) for p in points]
    assert dominators(losses, lower_is_better=True) == dominators(points)


@given(point_lists)
def test_a_method_is_dominated_by_one_that_beats_it_and_is_on_the_front(points):
    named = {point.method: point for point in points}
    found = dominators(points)
    assert found.keys() == named.keys()
    for method, by in found.items():
        if by is None:
            assert not any(beats(other, named[method]) for other in points)
        else:
            assert beats(named[by], named[method])
            assert found[by] is None


@given(point_lists, st.randoms())
def test_the_order_of_the_methods_changes_nothing(points, random):
    shuffled = random.sample(points, len(points))
    assert dominators(shuffled) == dominators(points)
    assert pareto_front(shuffled) == pareto_front(points)


@given(point_lists)
def test_along_the_front_a_better_score_costs_more(points):
    front = pareto_front(points)
    for one, other in pairwise(front):
        assert (one.cost, one.score) <= (other.cost, other.score)
        assert (one.cost == other.cost) == (one.score == other.score)

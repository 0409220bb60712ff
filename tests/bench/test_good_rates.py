"""Good learning rates: by hand, at the edges of the grid, and on random curves."""

from __future__ import annotations

import math

import pytest
from good_rates import good_rates
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.pages.row_scores import row_score

ACCURACY, LOSS, BLEU = row_score("classes"), row_score("losses"), row_score("texts", "bleu")
CURVE = {1e-5: [0.6], 1e-4: [0.795], 1e-3: [0.80], 1e-2: [0.791], 1e-1: [0.5]}


def test_rates_within_one_point_of_the_best_are_good():
    found = good_rates(CURVE, ACCURACY)
    assert (found.best, found.score, found.low, found.high) == (1e-3, 0.8, 1e-4, 1e-2)
    assert found.decades == pytest.approx(2)


def test_a_larger_spread_over_seeds_is_the_tolerance():
    curve = {1e-4: [0.77], 1e-3: [0.77, 0.83], 1e-2: [0.7]}
    found = good_rates(curve, ACCURACY)
    assert found.tolerance == pytest.approx(math.sqrt(2) * 0.03)
    assert (found.low, found.high) == (1e-4, 1e-3)


def test_exactly_one_point_is_still_good():
    assert good_rates({1e-4: [0.79], 1e-3: [0.80], 1e-2: [0.1]}, ACCURACY).low == 1e-4


@pytest.mark.parametrize("diverged", [[], [math.nan], [0.9, math.inf]])
def test_a_rate_that_diverged_ends_the_range(diverged):
    found = good_rates({1e-5: [0.8], 1e-4: diverged, 1e-3: [0.8], 1e-2: [0.8]}, ACCURACY)
    assert (found.best, found.low, found.high) == (1e-3, 1e-3, 1e-2) or found.best == 1e-5
    assert good_rates({1e-4: diverged}, ACCURACY) is None
    assert good_rates({}, ACCURACY) is None


def test_losses_and_scores_of_other_sizes():
    found = good_rates({1e-4: [2.01], 1e-3: [2.0], 1e-2: [2.03]}, LOSS)
    assert (found.best, found.tolerance, found.low, found.high) == (1e-3, 0.02, 1e-4, 1e-3)
    assert good_rates({1e-4: [29.1], 1e-3: [30.0], 1e-2: [28.0]}, BLEU).low == 1e-4


@given(
    st.dictionaries(
        st.sampled_from([10.0**-k for k in range(7)]),
        st.lists(st.floats(0, 1), max_size=3),
        max_size=7,
    )
)
def test_the_range_contains_the_best_rate_and_only_good_ones(curve):
    found = good_rates(curve, ACCURACY)
    means = {rate: sum(s) / len(s) for rate, s in curve.items() if s}
    assert (found is None) == (not means)
    if found:
        assert found.low <= found.best <= found.high
        assert found.score == pytest.approx(max(means.values()))
        for rate in curve:
            if found.low <= rate <= found.high:
                assert means[rate] >= found.score - found.tolerance - 1e-9
        assert found.decades >= 0

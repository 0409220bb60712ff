"""Paired comparisons: equations by hand, mirror images, few rows, and studies of a known truth."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t, ttest_ind, ttest_rel

from adapterhub.bench.paired import compare_each, compare_with, holm
from adapterhub.bench.statistics import RepeatedRuns
from adapterhub.errors import ConfigError
from adapterhub.pages.row_scores import row_score
from tests.kit.selection import long_table
from tests.kit.studies import PREDICTIONS, Truth, equal, runs_of, with_better

ACCURACY = row_score("classes")


def small_study(kind="accuracy", number=0, levels=(0.7, 0.7, 0.7), **size):
    truth = Truth(kind, levels, **{"rows": 60, **size})
    return truth.study(np.random.default_rng(number))


def numbers(found):
    return found.value, found.low, found.high, found.p, found.corrected


def test_holms_correction_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []


def test_deterministic_methods_are_compared_by_a_paired_t_test_over_rows():
    random = np.random.default_rng(0)
    first, second = random.random(300) < 0.6, random.random(300) < 0.7
    one, other = (
        runs_of([right], method=name, deterministic=True)
        for name, right in (("one", first), ("other", second))
    )
    (found,) = compare_with(one, [other])
    expected = ttest_rel(second.astype(float), first.astype(float))
    assert found.p == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval()
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_seeds_that_are_right_on_all_rows_alike_are_compared_by_a_t_test_over_seeds():
    """Where a seed moves the loss of all rows alike, only the seeds vary."""
    random = np.random.default_rng(1)
    levels = random.normal([[1.0], [1.2]], 0.1, size=(2, 4))
    one, other = (
        RepeatedRuns(
            f"m{i}", row_score("losses"), tuple(np.tile([level, 1.0], (50, 1)) for level in each)
        )
        for i, each in enumerate(levels)
    )
    (found,) = compare_with(one, [other])
    expected = ttest_ind(levels[1], levels[0])
    assert found.p == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval()
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_a_planted_difference_has_its_verdict():
    study = small_study(levels=(0.7, 0.95, 0.4, 0.7), rows=400)
    found = compare_with(study[0], study[1:])
    assert [f.verdict for f in found] == ["better", "worse", "tied"]
    assert [f.comparisons for f in found] == [3, 3, 3]
    assert all(f.p <= f.corrected for f in found)
    study = small_study("loss", levels=(0.7, 0.4, 0.7), rows=300)
    lower, equal = compare_with(study[0], study[1:])
    assert (lower.value < 0, lower.verdict, equal.verdict) == (True, "better", "tied")


def test_the_smallest_difference_is_that_of_holms_first_step():
    study = small_study()
    found = compare_with(study[0], study[1:])
    for pair in found:
        assert pair.high - pair.value == pytest.approx(t.ppf(0.975, pair.freedom) * pair.error)
        assert pair.p == pytest.approx(2 * t.sf(abs(pair.value) / pair.error, pair.freedom))
        at_it = 2 * t.sf(pair.smallest / pair.error, pair.freedom)
        assert holm([at_it, 1.0])[0] == pytest.approx(0.05)
    alone = replace(study[1], columns=study[1].columns[:1])
    assert compare_with(study[0], [alone])[0].smallest is None


def test_one_seed_few_rows_and_failed_seeds_have_no_verdict():
    study = small_study(levels=(0.7, 0.99, 0.7), rows=300)
    alone = replace(study[1], columns=study[1].columns[:1])
    found = compare_with(study[0], [alone, study[2]])
    assert (found[0].verdict, found[0].covers_seeds) == ("unknown", False)
    assert 0 < found[0].low < found[0].value < found[0].high
    assert found[1].comparisons == 1
    none = RepeatedRuns("none", ACCURACY, (), failed=3)
    found = compare_with(study[0], [replace(study[1], failed=1), none])
    assert (found[1].verdict, found[1].value) == ("unknown", None)
    assert found[0].comparisons == 1
    two = replace(study[1], columns=study[1].columns[:2], failed=1)
    assert compare_with(study[0], [two])[0].verdict == "unknown"
    assert [each.verdict for each in compare_with(none, study)] == ["unknown"] * 3
    for rows in (1, 19):
        few = runs_of(np.zeros((3, rows))), runs_of(np.ones((3, rows)), method="n")
        (pair,) = compare_with(few[0], few[1:])
        assert (pair.value, pair.low, pair.verdict) == (1.0, None, "unknown")
    with pytest.raises(ConfigError, match="cannot be compared"):
        compare_each([runs_of(np.eye(3, 30)), runs_of(np.eye(3, 31), method="n")])


@settings(max_examples=25)
@given(st.sampled_from(sorted(PREDICTIONS)), st.integers(0, 2**20))
def test_identical_scores_are_tied_with_certainty(kind, number):
    study = small_study(kind, number)
    random = np.random.default_rng(number)
    seeds = random.permutation(study[0].seeds)
    twin = replace(study[0], method="twin", columns=tuple(study[0].columns[i] for i in seeds))
    (found, *_) = compare_with(study[0], [twin, *study[1:]])
    assert found.value == pytest.approx(0, abs=1e-12)
    assert (found.p, found.verdict) == (1.0, "tied")


@settings(max_examples=50)
@given(
    st.sampled_from(sorted(PREDICTIONS)),
    st.integers(0, 2**20),
    st.lists(st.sampled_from((0.6, 0.7, 0.75, 0.9)), min_size=2, max_size=6),
)
def test_an_interval_excludes_zero_exactly_where_the_test_finds_a_difference(kind, number, levels):
    study = small_study(kind, number, tuple(levels))
    study[-1] = replace(study[0], method="twin") if number % 2 else study[-1]
    for pair in compare_each(study).values():
        low, high = pair.corrected_interval
        assert (low <= 0 <= high) == (pair.verdict == "tied")
        assert low <= pair.low <= pair.value <= pair.high <= high
        assert pair.mirrored.corrected_interval == pytest.approx((-high, -low))
        assert pair.mirrored.mirrored == pair


@settings(max_examples=25)
@given(st.sampled_from(sorted(PREDICTIONS)), st.integers(0, 2**20))
def test_the_order_of_rows_seeds_and_methods_changes_nothing(kind, number):
    study, random = small_study(kind, number), np.random.default_rng(number)
    rows = random.permutation(60)
    again = [replace(r, columns=tuple(c[rows] for c in r.columns[::-1])) for r in study]
    first = compare_with(study[0], study[1:])
    second = compare_with(again[0], again[:0:-1])
    for one, other in zip(first, second[::-1], strict=True):
        assert numbers(other) == pytest.approx(numbers(one), rel=1e-6, abs=1e-9)


# Planted truth: equal methods are called tied, and a better one is found.


UNEQUAL_SPREADS = (0.5, 0.2, 3.0, 0.2, 1.0, 0.5, 1.0, 3.0)


FEW = {
    "accuracy": equal("accuracy", 0.85),
    "f1, unequal spreads": equal("f1", 0.8, rows=300, sd=UNEQUAL_SPREADS),
}
OTHERS = {
    "two methods": equal("accuracy", 0.85, methods=2),
    "twenty methods": equal("accuracy", 0.85, methods=20),
    "four seeds": equal("accuracy", 0.85, seeds=4),
    "20 rows": equal("accuracy", 0.8, rows=20),
    "50 rows, loss": equal("loss", 0.5, rows=50),
    "almost all right": equal("accuracy", 0.99, rows=200, sd=(0.3,)),
    "methods that err on the same rows": equal("accuracy", 0.9, shares=(0.95, 0.03, 0.02)),
    "methods that err on different rows": equal("accuracy", 0.8, shares=(0.3, 0.35, 0.35)),
}
SIZES = FEW | OTHERS


def verdicts(truth, repetitions):
    """Return the verdicts of each of several studies."""
    random = np.random.default_rng(0)
    drawn = (truth.study(random) for _ in range(repetitions))
    return [[pair.verdict for pair in compare_with(study[0], study[1:])] for study in drawn]


@long_table("name", SIZES)
def test_equal_methods_are_called_tied(name):
    """As one of twenty is a false alarm, 18 of 200 are more than chance (p = 0.01)."""
    alarms = sum({*each} != {"tied"} for each in verdicts(SIZES[name], 200))
    assert alarms <= (10 if name in FEW else 18)


@pytest.mark.parametrize(
    ("truth", "by", "most"),
    [
        (equal("accuracy", 0.85), 0.05, 0.55),
        (equal("accuracy", 0.85), 0.08, 0.85),
        (equal("pearson", 0.85, rows=200), 0.05, 0.6),
        (equal("loss", 0.5), -0.08, 0.9),
    ],
    ids=["5 points", "8 points", "5 points of Pearson", "a loss lower by 0.08"],
)
def test_a_better_method_is_found(truth, by, most):
    """The share of 100 studies in which the last method is better, and all others are tied."""
    found = verdicts(with_better(truth, by), 100)
    assert np.mean([each[-1] == "better" for each in found]) >= most
    assert np.mean([{*each[:-1]} == {"tied"} for each in found]) >= 0.9

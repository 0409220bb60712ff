"""Planted truth: equal methods are called tied, and a better one is found."""

from dataclasses import replace

import numpy as np
import pytest

from adapterhub.bench.paired import compare_with
from tests.kit.selection import long_table
from tests.kit.studies import equal, with_better

UNEQUAL_SPREADS = (0.5, 0.2, 3.0, 0.2, 1.0, 0.5, 1.0, 3.0)
UNSTEADY = (0.5,) * 17 + (10.0,) * 3
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


def false_alarms(truth, repetitions):
    """Count the studies of equal methods with any verdict but "tied"."""
    return sum({*each} != {"tied"} for each in verdicts(truth, repetitions))


@long_table("name", SIZES)
def test_equal_methods_are_called_tied(name):
    """As one of twenty is a false alarm, 18 of 200 are more than chance (p = 0.01)."""
    assert false_alarms(SIZES[name], 200) <= (10 if name in FEW else 18)


def test_an_unsteady_method_does_not_blur_the_others():
    truth = equal("accuracy", 0.85, methods=20, rows=800, sd=UNSTEADY)
    levels = (truth.levels[0], 0.90, *truth.levels[2:])
    found = verdicts(replace(truth, levels=levels), 60)
    assert np.mean([each[0] == "better" for each in found]) >= 0.6
    assert np.mean([{*each[1:16]} == {"tied"} for each in found]) >= 0.9


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


def test_a_seed_effect_that_methods_share_is_no_alarm():
    """Training rows that are drawn by the seed move all methods alike: the test is conservative."""
    random, alarms = np.random.default_rng(0), 0
    truth = equal("loss", 0.5, methods=4, rows=200)
    for _ in range(100):
        shift = random.normal(size=3) * 0.03
        study = truth.study(random)
        for runs in study:
            for columns, by in zip(runs.columns, shift, strict=True):
                columns[:, 0] += by * columns[:, 1]
        alarms += {p.verdict for p in compare_with(study[0], study[1:])} != {"tied"}
    assert alarms <= 5

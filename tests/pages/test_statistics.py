"""Scores by class, calibration and paired tests, against scikit-learn, seqeval and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import precision_recall_fscore_support

from adapterhub.pages.row_scores import (
    KINDS,
    calibration,
    class_scores,
    confusions,
    difference,
    is_right,
    span_scores,
)
from tests.kit.runs import ROWS, predictions


def random_classes(count: int, seed: int, right: float = 0.7) -> list[dict]:
    random = np.random.default_rng(seed)
    labels = np.random.default_rng(99).integers(3, size=count)
    hit = random.random(count) < right
    given = np.where(hit, labels, random.integers(3, size=count))
    scores = random.random(count)
    return [
        {"label": f"c{a}", "prediction": f"c{b}", "score": float(s)}
        for a, b, s in zip(labels, given, scores, strict=True)
    ]


def test_class_scores_are_those_of_scikit_learn():
    rows = random_classes(200, 1)
    names = ["c0", "c1", "c2"]
    expected = precision_recall_fscore_support(
        [r["label"] for r in rows], [r["prediction"] for r in rows], labels=names
    )
    scores = class_scores(rows, names)
    found = [[s.precision, s.recall, s.f1, s.support] for s in scores]
    assert np.allclose(found, np.array(expected).T)
    assert sum(confusions(rows).values()) == 200


def test_classes_that_never_occur_score_zero():
    (score,) = class_scores([], ["x"])
    assert (score.precision, score.recall, score.f1) == (0, 0, 0)


def test_span_scores_count_kind_and_both_ends():
    scores = {s.name: (s.right, s.predicted, s.support) for s in span_scores(ROWS["spans"])}
    assert scores == {"loc": (1, 2, 1), "per": (0, 0, 2)}


def test_calibration_by_hand():
    bins, error = calibration(ROWS["classes"])
    assert [(b.low, b.count, b.accuracy) for b in bins] == [
        (0.5, 1, 1.0), (0.7, 1, 0.0), (0.8, 1, 1.0), (0.9, 1, 1.0)
    ]  # fmt: skip
    assert error == pytest.approx((0.4 + 0.8 + 0.1 + 0.0) / 4)


def test_a_probability_of_zero_is_in_the_first_bin():
    bins, _ = calibration([{"label": "a", "prediction": "a", "score": 0.0}])
    assert bins[0].low == 0.0


def test_right_is_said_or_compared():
    assert is_right({"label": "a", "prediction": "a"})
    assert not is_right({"label": "a", "prediction": "a", "right": False})


def test_mcnemar_counts_the_disagreements():
    first, second = random_classes(500, 1, right=0.5), random_classes(500, 2, right=0.8)
    found = difference(predictions("classes", first), predictions("classes", second))
    pairs = [(is_right(a), is_right(b)) for a, b in zip(first, second, strict=True)]
    assert found.better == pairs.count((False, True))
    assert found.worse == pairs.count((True, False))
    assert found.value == pytest.approx((found.better - found.worse) / 500)
    assert found.low < found.value < found.high
    assert found.is_significant
    back = difference(predictions("classes", second), predictions("classes", first))
    assert back.value == pytest.approx(-found.value)
    assert back.p == found.p


def test_two_equal_runs_do_not_differ():
    for kind in KINDS:
        found = difference(predictions(kind), predictions(kind))
        assert (found.value, found.low, found.high) == (0, 0, 0)
        assert not found.is_significant


def test_no_significance_where_there_is_no_difference():
    """At 5 %, about one of 20 pairs of equally good runs differs."""
    pairs = [(random_classes(200, s), random_classes(200, s + 1000)) for s in range(20)]
    found = [difference(predictions("classes", a), predictions("classes", b)) for a, b in pairs]
    assert sum(d.is_significant for d in found) <= 3


def test_the_correlation_of_numbers_is_pearson():
    random = np.random.default_rng(0)
    true = random.normal(size=300)
    files = [
        predictions("numbers", [
            {"label": float(t), "prediction": float(p)} for t, p in zip(true, given, strict=True)
        ])
        for given in (true + 2 * random.normal(size=300), true + random.normal(size=300))
    ]  # fmt: skip
    found = difference(*files)
    pairs = [[(row["label"], row["prediction"]) for row in file.rows] for file in files]
    expected = [np.corrcoef(pair, rowvar=False)[0, 1] for pair in pairs]
    assert found.score == "pearson"
    assert found.value == pytest.approx(expected[1] - expected[0])
    assert found.is_significant


def test_the_loss_is_weighted_by_tokens():
    first = [{"loss": 1.0, "tokens": 1}, {"loss": 3.0, "tokens": 3}]
    second = [{"loss": 1.0, "tokens": 1}, {"loss": 1.0, "tokens": 3}]
    found = difference(predictions("losses", first), predictions("losses", second))
    assert found.value == pytest.approx(1.0 - 2.5)


@pytest.mark.parametrize(("kind", "field"), [("losses", "loss"), ("numbers", "prediction")])
def test_a_run_that_diverged_differs_by_a_finite_number(kind, field):
    rows = [dict(row) for row in ROWS[kind]]
    rows[1][field] = rows[2][field] = 1e308  # infinity, in a predictions file
    found = difference(predictions(kind), predictions(kind, rows))
    assert np.isfinite([found.value, found.low, found.high]).all()
    assert found.value > 1e50 if kind == "losses" else -2 <= found.value < 0

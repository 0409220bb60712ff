"""The error of one score: the interval of a study with one seed, and what few rows do not tell."""

from __future__ import annotations

import numpy as np
import pytest
from run_folders import ROWS, predictions

from adapterhub.bench.statistics import estimate_all, repeated_runs
from adapterhub.files.scores import ScoreError, recorded_errors, score_text
from adapterhub.pages.predictions import KINDS
from adapterhub.pages.row_scores import row_scores
from adapterhub.pages.score_errors import EvaluatedRows, score_error, score_errors
from adapterhub.tasks._metrics import RANKING_METRICS

TEXTS = [
    {"label": "it rains here every day", "prediction": given, "score": score}
    for given, score in (("it rains here every day", 1.0), ("it rains here each day", 0.5))
]


def drawn(kind, rows):
    """Draw rows of a kind, right and wrong ones."""
    random, every = np.random.default_rng(1), ROWS[kind] if kind != "texts" else TEXTS
    return predictions(kind, [every[i] for i in random.integers(len(every), size=rows)])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind in KINDS
        for name in row_scores(kind)
        if name not in ("wer", *RANKING_METRICS)
    ],
)
def test_the_interval_is_that_of_a_study_with_one_seed(kind, name):
    file, score = drawn(kind, 40), row_scores(kind)[name]
    (expected,) = estimate_all([repeated_runs("lora", [file], score)])
    found = score_error(score, score.columns(file.rows))
    assert (found.rows, found.low, found.high) == (40, expected.low, expected.high)
    assert found.low < expected.value < found.high
    errors = score_errors({name: expected.value}, {"": EvaluatedRows(40, file)})
    assert errors == {name: found}


@pytest.mark.parametrize(("rows", "low"), [(2, 0.02), (4, 0.3), (60, 0.95)])
def test_all_right_is_not_sure_with_few_rows(rows, low):
    score = row_scores("classes")["accuracy"]
    file = predictions("classes", [ROWS["classes"][0]] * rows)
    found = score_error(score, score.columns(file.rows))
    assert found.high == pytest.approx(1)
    assert 0 < found.low < low


@pytest.mark.parametrize(
    ("kind", "name", "rows"),
    [
        ("classes", "accuracy", [0]),
        ("texts", "mean score", [1]),
        ("classes", "matthews", [0, 1, 0, 1]),
        ("losses", "loss", [1, 1, 1]),
    ],
)
def test_one_row_and_rows_that_change_nothing_have_no_interval(kind, name, rows):
    score = row_scores(kind)[name]
    file = predictions(kind, [ROWS[kind][i] for i in rows])
    assert score_error(score, score.columns(file.rows)) == ScoreError(len(rows))


def test_a_metric_that_is_no_score_of_its_rows_has_their_number_alone():
    a, b = (EvaluatedRows(n, drawn("classes", n)) for n in (30, 12))
    own = row_scores("classes")["accuracy"]
    value = float(own.summarize(own.columns(b.predictions.rows).sum(0)))
    metrics = {"mean": 0.5, "a/accuracy": 0.123, "a/other": 0.5, "b/accuracy": value}
    found = score_errors(metrics, {"a/": a, "b/": b, "c/": EvaluatedRows(8)})
    assert {name: error.rows for name, error in found.items()} == {
        "mean": 50, "a/accuracy": 30, "a/other": 30, "b/accuracy": 12,
    }  # fmt: skip
    assert [name for name, error in found.items() if error.interval] == ["b/accuracy"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ScoreError(60, 0.8, 0.951), "0.9 (0.80\N{EN DASH}0.95, n = 60)"),
        (ScoreError(10_000, 0.8931, 0.9021), "0.9 (0.893\N{EN DASH}0.902, n = 10,000)"),
        (ScoreError(8, -0.43, 1.0), "0.9 (-0.43 to 1.00, n = 8)"),
        (ScoreError(1), "0.9 (n = 1)"),
        (None, "0.9"),
    ],
)
def test_a_score_is_written_with_its_error(error, text):
    assert score_text("0.9", error) == text
    if error:
        assert recorded_errors({"x": error.record()}) == {"x": error}


@pytest.mark.parametrize(
    "records", [None, [1], {"x": 1}, {"x": {"n": "2"}}, {"x": {"n": True}}, {"x": {"low": 0.1}}]
)
def test_records_of_strangers_of_another_form_are_left_out(records):
    assert recorded_errors(records) == {}

"""Metrics worked by hand, and their limits."""

from __future__ import annotations

import json
import math
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import pearsonr, spearmanr
from seqeval import metrics as seqeval
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, mean_squared_error

from adapterhub.errors import DataError
from adapterhub.tasks._metrics import (
    answer_metrics,
    classification_metrics,
    entity_metrics,
    generation_metrics,
    regression_metrics,
)

METRICS = {"classification": classification_metrics, "regression": regression_metrics}

label = st.sampled_from(["no", "yes", "maybe"])
number = st.floats(-1e6, 1e6)
whole_number = st.integers(-1000, 1000)
tag = st.sampled_from(["O", "B-x", "I-x", "B-y", "I-y"])


def test_classification_by_hand() -> None:
    metrics = classification_metrics(["a", "a", "a", "b"], ["a", "a", "b", "b"])
    # F1 is 4/5 for a and 2/3 for b; Matthews is (2·1 - 1·0) / sqrt(2·3·1·2).
    assert metrics == pytest.approx(
        {"accuracy": 0.75, "macro_f1": (4 / 5 + 2 / 3) / 2, "matthews": 2 / math.sqrt(12)}
    )


def test_regression_by_hand() -> None:
    metrics = regression_metrics([0, 1, 2], [0, 1, 5])
    assert metrics == pytest.approx(
        {"pearson": 5 / math.sqrt(28), "spearman": 1.0, "mse": 3.0}, abs=1e-12
    )


@given(st.lists(st.tuples(label, label), min_size=1))
def test_classification_is_that_of_sklearn(pairs: list[tuple[str, str]]) -> None:
    labels, predictions = zip(*pairs, strict=True)
    expected = {
        "accuracy": accuracy_score(labels, predictions),
        "macro_f1": f1_score(labels, predictions, average="macro", zero_division=0.0),
        "matthews": matthews_corrcoef(labels, predictions) if len(set(labels)) > 1 else 0.0,
    }
    assert classification_metrics(labels, predictions) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.tuples(whole_number, whole_number), min_size=2))
def test_regression_is_that_of_scipy(pairs: list[tuple[int, int]]) -> None:
    labels, predictions = zip(*pairs, strict=True)
    metrics = regression_metrics(labels, predictions)
    assert metrics["mse"] == pytest.approx(mean_squared_error(labels, predictions))
    if len(set(labels)) > 1 and len(set(predictions)) > 1:
        assert metrics["pearson"] == pytest.approx(pearsonr(*zip(*pairs, strict=True))[0], abs=1e-9)
        assert metrics["spearman"] == pytest.approx(spearmanr(labels, predictions)[0], abs=1e-9)


@given(st.lists(st.lists(st.tuples(tag, tag), min_size=1), min_size=1))
def test_entities_are_those_of_seqeval(sentences: list[list[tuple[str, str]]]) -> None:
    tags, found = ([[pair[i] for pair in row] for row in sentences] for i in (0, 1))
    expected = {
        "f1": seqeval.f1_score(tags, found, zero_division=0),
        "precision": seqeval.precision_score(tags, found, zero_division=0),
        "recall": seqeval.recall_score(tags, found, zero_division=0),
        "accuracy": seqeval.accuracy_score(tags, found),
    }
    assert entity_metrics(tags, found) == pytest.approx(expected)


def test_huge_and_tiny_numbers_correlate() -> None:
    for scale in (1e-300, 1e300):
        metrics = regression_metrics([0.0, scale, 2 * scale], [0.0, scale, 5 * scale])
        assert metrics["pearson"] == pytest.approx(5 / math.sqrt(28))
        assert metrics["spearman"] == pytest.approx(1.0)


def test_matthews_of_many_examples_does_not_overflow() -> None:
    assert classification_metrics([0, 1] * 100_000, [0, 1] * 100_000)["matthews"] == 1.0


@given(st.lists(st.tuples(label, label), min_size=1))
def test_classification_is_silent_json_and_in_range(pairs: list[tuple[str, str]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics = classification_metrics([p[0] for p in pairs], [p[1] for p in pairs])
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics
    assert {type(value) for value in metrics.values()} == {float}
    assert all(-1 <= value <= 1 for value in metrics.values())


@given(st.lists(st.tuples(number, number), min_size=1))
def test_regression_is_silent_json_and_in_range(pairs: list[tuple[float, float]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics = regression_metrics([p[0] for p in pairs], [p[1] for p in pairs])
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics
    assert {type(value) for value in metrics.values()} == {float}
    assert all(abs(metrics[name]) <= 1 + 1e-9 for name in ("pearson", "spearman"))


@pytest.mark.parametrize("predictions", [[2.0, 2.0, 2.0], [0.1 + 0.2] * 3])
def test_constant_predictions_correlate_with_nothing(predictions: list[float]) -> None:
    metrics = regression_metrics([1.0, 2.0, 3.0], predictions)
    assert (metrics["pearson"], metrics["spearman"]) == (0.0, 0.0)


def test_one_predicted_class_has_no_matthews_correlation() -> None:
    assert classification_metrics(["a", "b"], ["a", "a"])["matthews"] == 0.0


@pytest.mark.parametrize("kind", sorted(METRICS))
def test_right_predictions_are_best(kind: str) -> None:
    values = [0, 1, 2, 1]
    metrics = METRICS[kind](values, values)
    assert metrics.pop("mse", 0.0) == 0.0
    assert metrics == pytest.approx(dict.fromkeys(metrics, 1.0))


@pytest.mark.parametrize("kind", sorted(METRICS))
@pytest.mark.parametrize("predictions", [[], [1]])
def test_lists_of_different_lengths_are_refused(kind: str, predictions: list[int]) -> None:
    with pytest.raises(DataError, match="cannot be compared"):
        METRICS[kind]([0, 1][: 2 * len(predictions)], predictions)


def test_predictions_that_are_not_finite_are_refused() -> None:
    with pytest.raises(DataError, match="1 of 2 predictions") as caught:
        regression_metrics([1.0, 2.0], [1.0, math.nan])
    assert caught.value.offenders == ("predictions[1] is nan",)


def test_entities_count_whole() -> None:
    """Two of three entities found, one of them with a wrong end: worked by hand."""
    tags = [["B-x", "I-x", "O", "B-y"], ["O", "B-x"]]
    found = [["B-x", "O", "O", "B-y"], ["O", "B-x"]]
    metrics = entity_metrics(tags, found)
    assert metrics == pytest.approx(
        {"f1": 2 / 3, "precision": 2 / 3, "recall": 2 / 3, "accuracy": 5 / 6}
    )
    assert entity_metrics([["O"]], [["O"]])["f1"] == 0.0


@pytest.mark.parametrize(
    ("answers", "found", "f1", "exact"),
    [
        (["The Eiffel Tower"], "eiffel tower!", 1.0, 1.0),
        (["in 1066", "1066"], "1066", 1.0, 1.0),
        (["red blue"], "blue green", 0.5, 0.0),
        (["red"], "", 0.0, 0.0),
        ([], "", 1.0, 1.0),
        ([], "red", 0.0, 0.0),
        (["the"], "a", 1.0, 1.0),
    ],
)
def test_answers_by_squads_rules(answers: list[str], found: str, f1: float, exact: float) -> None:
    metrics = answer_metrics([answers], [found])
    assert metrics == pytest.approx({"f1": f1, "exact_match": exact})


def test_answers_of_both_kinds() -> None:
    metrics = answer_metrics([["red"], ["blue"], []], ["red", "", ""])
    assert metrics == pytest.approx(
        {"f1": 2 / 3, "exact_match": 2 / 3, "has_answer_f1": 0.5, "no_answer_f1": 1.0}
    )


def test_generated_texts() -> None:
    same = ["the movie was very good", "a film"]
    assert generation_metrics("bleu", same, same) == pytest.approx({"bleu": 100, "chrf": 100})
    assert generation_metrics("bleu", same, ["no", "none"])["bleu"] < 5
    rouge = generation_metrics("rouge", ["a good film", "x"], ["a bad film", "x"])
    assert rouge["rouge1"] == pytest.approx((2 / 3 + 1) / 2)
    assert rouge["rouge2"] == pytest.approx(0.0)
    assert rouge["rougeL"] == rouge["rougeLsum"] == pytest.approx((2 / 3 + 1) / 2)
    assert generation_metrics("exact", ["a", "b "], [" a", "c"]) == {"exact_match": 0.5}
    with pytest.raises(DataError):
        generation_metrics("exact", ["a"], [])

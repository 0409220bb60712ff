"""Metrics worked by hand, and their limits."""

from __future__ import annotations

import json
import math
import sys
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks.common.metrics import (
    answer_metrics,
    classification_metrics,
    entity_metrics,
    generation_metrics,
    regression_metrics,
    spoken,
    transcription_metrics,
)

METRICS = {"classification": classification_metrics, "regression": regression_metrics}

label = st.sampled_from(["no", "yes", "maybe"])
number = st.floats(-1e6, 1e6)


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


def test_error_rates_by_hand() -> None:
    """Two of five words, and of 17 characters with spaces: one other letter, four left out."""
    references = ["the cat sat", "It is!"]
    found = ["the bat", "it is"]
    assert transcription_metrics(references, found) == pytest.approx({"wer": 2 / 5, "cer": 5 / 16})
    exact = transcription_metrics(references, found, exact=True)
    assert exact == pytest.approx({"wer": 4 / 5, "cer": 7 / 17})
    assert transcription_metrics(["a b"], ["a b c d e"])["wer"] == 1.5, "it may be above 1"
    assert transcription_metrics(["?"], [""]) == {"wer": 0.0, "cer": 0.0}
    with pytest.raises(DataError, match="cannot be compared"):
        transcription_metrics([], [])


def test_error_rates_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jiwer", None)
    with pytest.raises(ConfigError, match="jiwer, which is not installed"):
        transcription_metrics(["a"], ["a"])


def test_what_is_spoken() -> None:
    assert spoken("  \u201cDon't!\u201d he said -- twice.") == "don't he said twice"
    assert spoken("'tis the dogs' Zu\u0308rich") == "tis the dogs zu\u0308rich"


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

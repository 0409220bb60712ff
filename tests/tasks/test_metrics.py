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

label = st.sampled_from(["no", "yes", "maybe"])
number = st.floats(-1e6, 1e6)


@pytest.mark.parametrize(
    ("metrics", "labels", "predictions", "expected"),
    [
        # F1 is 4/5 for a and 2/3 for b; Matthews is (2·1 - 1·0) / sqrt(2·3·1·2).
        (classification_metrics, [*"aaab"], [*"aabb"],
         {"accuracy": 0.75, "macro_f1": (4 / 5 + 2 / 3) / 2, "matthews": 2 / math.sqrt(12)}),
        (classification_metrics, [*"ab"], [*"aa"],
         {"accuracy": 0.5, "macro_f1": 1 / 3, "matthews": 0.0}),
        (classification_metrics, [0, 1, 2, 1], [0, 1, 2, 1],
         {"accuracy": 1, "macro_f1": 1, "matthews": 1}),
        (regression_metrics, [0, 1, 2], [0, 1, 5],
         {"pearson": 5 / math.sqrt(28), "spearman": 1.0, "mse": 3.0}),
        (regression_metrics, [0, 1, 2, 1], [0, 1, 2, 1], {"pearson": 1, "spearman": 1, "mse": 0}),
        (regression_metrics, [1.0, 2.0, 3.0], [2.0] * 3,
         {"pearson": 0.0, "spearman": 0.0, "mse": 2 / 3}),
        (regression_metrics, [0.0, 0.3, 0.6], [0.1 + 0.2] * 3,
         {"pearson": 0.0, "spearman": 0.0, "mse": 0.06}),
    ],
)  # fmt: skip
def test_classification_and_regression_by_hand(metrics, labels, predictions, expected):
    assert metrics(labels, predictions) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("metrics", [classification_metrics, regression_metrics])
@given(data=st.data())
def test_metrics_are_silent_json_and_in_range(metrics, data):
    each = label if metrics is classification_metrics else number
    pairs = data.draw(st.lists(st.tuples(each, each), min_size=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = metrics([p[0] for p in pairs], [p[1] for p in pairs])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert {type(value) for value in found.values()} == {float}
    found.pop("mse", 0)
    assert all(abs(value) <= 1 + 1e-9 for value in found.values())


@pytest.mark.parametrize("metrics", [classification_metrics, regression_metrics])
@pytest.mark.parametrize("predictions", [[], [1]])
def test_lists_of_different_lengths_are_refused(metrics, predictions):
    with pytest.raises(DataError, match="cannot be compared"):
        metrics([0, 1][: 2 * len(predictions)], predictions)


def test_error_rates_by_hand():
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


def test_what_is_spoken(monkeypatch):
    assert spoken("  \u201cDon't!\u201d he said -- twice.") == "don't he said twice"
    assert spoken("'tis the dogs' Zu\u0308rich") == "tis the dogs zu\u0308rich"
    monkeypatch.setitem(sys.modules, "jiwer", None)
    with pytest.raises(ConfigError, match="jiwer, which is not installed"):
        transcription_metrics(["a"], ["a"])


def test_predictions_that_are_not_finite_are_refused():
    with pytest.raises(DataError, match="1 of 2 predictions") as caught:
        regression_metrics([1.0, 2.0], [1.0, math.nan])
    assert caught.value.offenders == ("predictions[1] is nan",)


def test_entities_count_whole():
    """Two of three entities found, one of them with a wrong end: worked by hand."""
    tags = [["B-x", "I-x", "O", "B-y"], ["O", "B-x"]]
    found = [["B-x", "O", "O", "B-y"], ["O", "B-x"]]
    metrics = entity_metrics(tags, found)
    assert metrics == pytest.approx(
        {"f1": 2 / 3, "precision": 2 / 3, "recall": 2 / 3, "accuracy": 5 / 6}
    )
    assert entity_metrics([["O"]], [["O"]])["f1"] == 0.0


def test_answers_by_squads_rules():
    for answers, found, f1, exact in (
        (["The Eiffel Tower"], "eiffel tower!", 1.0, 1.0),
        (["in 1066", "1066"], "1066", 1.0, 1.0),
        (["red blue"], "blue green", 0.5, 0.0),
        (["red"], "", 0.0, 0.0),
        ([], "", 1.0, 1.0),
        ([], "red", 0.0, 0.0),
        (["the"], "a", 1.0, 1.0),
    ):
        expected = pytest.approx({"f1": f1, "exact_match": exact})
        assert answer_metrics([answers], [found]) == expected, (answers, found)
    metrics = answer_metrics([["red"], ["blue"], []], ["red", "", ""])
    assert metrics == pytest.approx(
        {"f1": 2 / 3, "exact_match": 2 / 3, "has_answer_f1": 0.5, "no_answer_f1": 1.0}
    )


def test_generated_texts():
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

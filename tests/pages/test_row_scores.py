"""Scores of summed columns, against the metrics that tasks compute of whole predictions."""

from __future__ import annotations

import numpy as np
import pytest

from adapterhub.errors import ConfigError
from adapterhub.pages.row_scores import KINDS, row_score
from adapterhub.tasks import TASKS
from adapterhub.tasks.common.metrics import (
    classification_metrics,
    generation_metrics,
    multi_label_metrics,
    regression_metrics,
)
from tests.kit.runs import ROWS

TEXTS = ["the cat sat on the mat", "a dog", "it rains here every day", "x y z"]
GIVEN = ["the cat sat on a mat", "a dog", "it rains every day here", ""]


def total(kind, metric, rows):
    score = row_score(kind, metric)
    return float(score.summarize(score.columns(rows).sum(0)))


def pairs(labels, predictions, **more):
    rows = zip(labels, predictions, strict=True)
    return [{"label": a, "prediction": b, **more} for a, b in rows]


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("metric", ["accuracy", "matthews", "macro_f1"])
def test_scores_of_classes_are_those_of_the_task(metric, classes):
    random = np.random.default_rng(classes)
    labels, other = (random.integers(classes, size=100) for _ in range(2))
    given = np.where(random.random(100) < 0.5, labels, other)
    names = [[f"c{number}" for number in numbers] for numbers in (labels, given)]
    expected = classification_metrics(*names)[metric]
    assert total("classes", metric, pairs(*names)) == pytest.approx(expected)


@pytest.mark.parametrize("metric", ["accuracy", "matthews", "macro_f1"])
@pytest.mark.parametrize("given", ["ab", "aa"])
def test_scores_of_a_single_class_are_those_of_the_task(metric, given):
    expected = classification_metrics(list("aa"), list(given))[metric]
    assert total("classes", metric, pairs("aa", given)) == pytest.approx(expected)


@pytest.mark.parametrize("metric", ["pearson", "mse"])
def test_scores_of_numbers_are_those_of_the_task(metric):
    random = np.random.default_rng(0)
    true = 1e6 + random.normal(size=50)
    given = true + random.normal(size=50)
    expected = regression_metrics(list(true), list(given))[metric]
    rows = pairs(map(float, true), map(float, given))
    assert total("numbers", metric, rows) == pytest.approx(expected)


def test_the_correlation_with_a_constant_is_zero():
    assert total("numbers", "pearson", pairs([1.0, 2.0, 4.0], [0.1, 0.1, 0.1])) == 0.0


@pytest.mark.parametrize("metric", ["micro_f1", "exact_match"])
def test_scores_of_sets_are_those_of_the_task(metric):
    rows = ROWS["sets"]
    expected, given = ([row[name] for row in rows] for name in ("label", "prediction"))
    found = multi_label_metrics(["a", "b"], expected, given)[metric]
    assert total("sets", metric, rows) == pytest.approx(found)


@pytest.mark.parametrize("metric", ["bleu", "rouge1", "rouge2", "rougeL", "rougeLsum"])
def test_scores_of_texts_are_those_of_the_task(metric):
    kind = "bleu" if metric == "bleu" else "rouge"
    expected = generation_metrics(kind, TEXTS, GIVEN)[metric]
    assert total("texts", metric, pairs(TEXTS, GIVEN, score=0.0)) == pytest.approx(expected)


def test_bleu_without_a_shared_word_is_zero():
    rows = pairs(["a b c d e"], ["v w x y z"], score=0.0)
    assert total("texts", "bleu", rows) == pytest.approx(
        generation_metrics("bleu", ["a b c d e"], ["v w x y z"])["bleu"]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_many_sums_are_summarized_at_once(kind):
    score = row_score(kind)
    columns = score.columns(ROWS[kind])
    sums = np.stack([columns.sum(0), columns[1:].sum(0)])
    each = [float(score.summarize(row)) for row in sums]
    assert score.summarize(sums).tolist() == pytest.approx(each)
    assert score.summarize(np.stack([sums, sums])).shape == (2, 2)


def test_every_main_metric_of_a_task_is_computed_from_rows():
    found = set()
    for name, task in TASKS.items():
        variants = [task()]
        if name == "seq2seq":
            variants = [task(metric=metric) for metric in ("bleu", "rouge", "exact")]
        if name == "causal-lm":
            variants.append(task(generate=True))
        for variant in variants:
            if variant.main_metric == "ndcg@10":  # of a query's rows together: no sum over rows
                assert row_score(variant.outcomes).name in ("accuracy", "pearson")
            elif variant.outcomes:
                score = row_score(variant.outcomes, variant.main_metric)
                assert score.name == variant.main_metric
                assert score.lower_is_better == (variant.main_metric in ("loss", "wer"))
                found.add(score.name)
    assert found == {
        "accuracy", "pearson", "micro_f1", "f1", "loss", "bleu", "rougeL", "exact_match",
        "wer",
    }  # fmt: skip


def test_points_are_hundredths_of_shares_and_correlations():
    assert row_score("classes", "matthews").points == 100
    assert row_score("texts", "bleu").points == 1
    assert row_score("losses").points == 1


def test_an_unknown_score_is_refused():
    with pytest.raises(ConfigError, match="spearman"):
        row_score("numbers", "spearman")

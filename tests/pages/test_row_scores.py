"""predictions.jsonl, and the scores of its rows: against other metrics, and by hand."""

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from sklearn.metrics import precision_recall_fscore_support

from adapterhub.data.examples import Example, data_hash
from adapterhub.errors import ConfigError, FileError
from adapterhub.pages import row_scores
from adapterhub.pages.row_scores import (
    KINDS,
    PREDICTIONS,
    difference,
    is_right,
    read_predictions,
    row_score,
)
from adapterhub.tasks import TASKS, parse_task
from adapterhub.tasks.classification import Number, Scored
from adapterhub.tasks.common import metrics as task_metrics
from tests.kit.runs import ROWS, predictions


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_read_back(kind, tmp_path):
    assert read_predictions(tmp_path) is None, "no file"
    file = predictions(kind)
    (tmp_path / PREDICTIONS).write_bytes(file.to_bytes())
    assert read_predictions(tmp_path) == file
    if kind == "images":  # version 0.3 calls them pictures
        (tmp_path / PREDICTIONS).write_bytes(file.to_bytes().replace(b'"images"', b'"pictures"', 1))
        assert read_predictions(tmp_path) == file


def test_outcomes_hold_texts_label_prediction_and_score():
    task = parse_task("classification")
    examples = [Example("a", label="pos"), Example("b", "c", "neg")]
    given = [Scored("pos", {"pos": 0.8, "neg": 0.2}), Scored("pos", {"pos": 0.6, "neg": 0.4})]
    file = row_scores.outcomes_of(task, examples, given, ("neg", "pos"), 7)
    assert file is not None
    assert (file.kind, file.step, file.data) == ("classes", 7, data_hash(examples))
    assert file.rows[1] == {
        "id": 1, "texts": ["b", "c"], "label": "neg", "prediction": "pos", "score": 0.6
    }  # fmt: skip
    assert row_scores.outcomes_of(task, examples, given[:1], (), 1) is None, (
        "not one for each example"
    )


def test_long_texts_are_cut_and_numbers_are_json():
    examples = [Example("x" * 10_000, label=1.0)]
    file = row_scores.outcomes_of(parse_task("regression"), examples, [Number(math.nan)], (), 1)
    assert file is not None
    assert len(file.rows[0]["texts"][0]) < 5000
    assert file.rows[0]["prediction"] == 1e308
    for line in file.to_bytes().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def spans(span):
    return predictions("spans", [{"label": [span], "prediction": []}]).to_bytes()


BROKEN = {
    "a cut file": lambda data: data[:-20],
    "fewer rows": lambda data: data[: data.rindex(b"\n", 0, -1) + 1],
    "no rows": lambda data: data.splitlines()[0].replace(b'"rows": 4', b'"rows": 0') + b"\n",
    "a newer format": lambda data: data.replace(b'"format": 1', b'"format": 2'),
    "another type": lambda data: data.replace(b'"score": 0.6', b'"score": "0.6"'),
    "a missing field": lambda data: data.replace(b'"prediction"', b'"predicted"'),
    "texts that are none": lambda data: data.replace(b'["a good movie"]', b"[1]"),
    "no JSON": lambda data: b"\xff" + data,
    "a list": lambda data: b"[]\n" + data,
    "deep nesting": lambda data: b"[" * 100_000 + data,
    "a span that ends before it begins": lambda data: spans(["per", 3, 1]),
    "a span before the text": lambda data: spans(["per", -1, 2]),
    "a span of a number": lambda data: spans([1, 0, 1]),
    "a span from a text": lambda data: spans(["per", "0", 1]),
    "a number as a span": lambda data: spans(3),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused(name, tmp_path):
    path = tmp_path / PREDICTIONS
    path.write_bytes(BROKEN[name](predictions("classes").to_bytes()))
    with pytest.raises(FileError, match="is broken"):
        read_predictions(tmp_path)


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "other").write_bytes(predictions("texts").to_bytes())
    (tmp_path / PREDICTIONS).symlink_to(tmp_path / "other")
    with pytest.raises(FileError, match="is broken"):
        read_predictions(tmp_path)


def test_one_class_for_rows_of_several_classes():
    file = predictions("classes")
    assert len({row["label"] for row in file.rows}) > 1
    assert file.only_class is None
    same = [row | {"prediction": "x"} for row in file.rows]
    assert replace(file, rows=same).only_class == "x"
    assert replace(file, rows=[row | {"label": "x"} for row in same]).only_class is None
    assert replace(file, rows=[]).only_class is None
    assert predictions("texts").only_class is None


# Scores of summed columns


def random_classes(count, seed, right=0.7, classes=3):
    random = np.random.default_rng(seed)
    labels = np.random.default_rng(99).integers(classes, size=count)
    hit = random.random(count) < right
    given = np.where(hit, labels, random.integers(classes, size=count))
    drawn = zip(labels, given, random.random(count), strict=True)
    return [{"label": f"c{a}", "prediction": f"c{b}", "score": float(s)} for a, b, s in drawn]


def random_numbers(count, spread, middle=0.0):
    random = np.random.default_rng(0)
    true = middle + random.normal(size=count)
    given = true + spread * random.normal(size=count)
    pairs = zip(true.tolist(), given.tolist(), strict=True)
    return [{"label": a, "prediction": b} for a, b in pairs]


def pairs_of(rows):
    return [row["label"] for row in rows], [row["prediction"] for row in rows]


TEXTS = (
    ["the cat sat on the mat", "a dog", "it rains here every day", "x y z"],
    ["the cat sat on a mat", "a dog", "it rains every day here", ""],
)
NO_SHARED = ["a b c d e"], ["v w x y z"]
OF_CLASSES = ("accuracy", "matthews", "macro_f1")
OF_SETS = partial(task_metrics.multi_label_metrics, ["a", "b"])
BLEU, ROUGE = (partial(task_metrics.generation_metrics, name) for name in ("bleu", "rouge"))


@pytest.mark.parametrize(
    ("kind", "names", "pairs", "metrics"),
    [
        *(
            ("classes", OF_CLASSES, pairs, task_metrics.classification_metrics)
            for pairs in (
                *(pairs_of(random_classes(100, 1, 0.5, classes)) for classes in (2, 4)),
                (list("aa"), list("ab")),
                (list("aa"), list("aa")),
            )
        ),
        ("numbers", ("pearson", "mse"), pairs_of(random_numbers(50, 1, 1e6)),
         task_metrics.regression_metrics),
        ("sets", ("micro_f1", "exact_match"), pairs_of(ROWS["sets"]), OF_SETS),
        ("texts", ("bleu",), TEXTS, BLEU),
        ("texts", ("bleu",), NO_SHARED, BLEU),
        ("texts", ("rouge1", "rouge2", "rougeL", "rougeLsum"), TEXTS, ROUGE),
    ],
)  # fmt: skip
def test_scores_are_those_of_the_task(kind, names, pairs, metrics):
    rows = [{"label": a, "prediction": b, "score": 0.0} for a, b in zip(*pairs, strict=True)]
    expected = metrics(*pairs)
    for name in names:
        score = row_score(kind, name)
        found = float(score.summarize(score.columns(rows).sum(0)))
        assert found == pytest.approx(expected[name]), name


def test_points_are_hundredths_and_a_correlation_with_a_constant_is_zero():
    assert row_score("classes", "matthews").points == 100
    assert row_score("texts", "bleu").points == row_score("losses").points == 1
    with pytest.raises(ConfigError, match="spearman"):
        row_score("numbers", "spearman")
    score = row_score("numbers", "pearson")
    rows = [{"label": value, "prediction": 0.1} for value in (1.0, 2.0, 4.0)]
    assert score.summarize(score.columns(rows).sum(0)) == 0.0


def test_every_main_metric_of_a_task_is_computed_from_rows():
    assert len(TASKS) > 8
    assert {cls().outcomes for cls in TASKS.values()} == set(KINDS) == set(ROWS)
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
        "accuracy", "pearson", "micro_f1", "f1", "loss", "bleu", "rougeL", "exact_match", "wer",
        "reward",
    }  # fmt: skip


# Scores by class, and calibration


def test_class_scores_are_those_of_scikit_learn():
    rows, names = random_classes(200, 1), ["c0", "c1", "c2"]
    expected = precision_recall_fscore_support(*pairs_of(rows), labels=names)
    found = [[s.precision, s.recall, s.f1, s.support] for s in row_scores.class_scores(rows, names)]
    assert np.allclose(found, np.array(expected).T)
    assert sum(row_scores.confusions(rows).values()) == 200
    (never,) = row_scores.class_scores([], ["x"])
    assert (never.precision, never.recall, never.f1) == (0, 0, 0)


def test_span_scores_count_kind_and_both_ends():
    scores = {
        s.name: (s.right, s.predicted, s.support) for s in row_scores.span_scores(ROWS["spans"])
    }
    assert scores == {"loc": (1, 2, 1), "per": (0, 0, 2)}


def test_calibration_by_hand():
    bins, error = row_scores.calibration(ROWS["classes"])
    assert [(b.low, b.count, b.accuracy) for b in bins] == [
        (0.5, 1, 1.0), (0.7, 1, 0.0), (0.8, 1, 1.0), (0.9, 1, 1.0)
    ]  # fmt: skip
    assert error == pytest.approx((0.4 + 0.8 + 0.1 + 0.0) / 4)
    bins, _ = row_scores.calibration([{"label": "a", "prediction": "a", "score": 0.0}])
    assert bins[0].low == 0.0


# Two runs on the same rows


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
    assert not is_right({"label": "a", "prediction": "a", "right": False}), "said, not compared"


@pytest.mark.parametrize("kind", KINDS)
def test_two_equal_runs_do_not_differ(kind):
    found = difference(predictions(kind), predictions(kind))
    assert (found.value, found.low, found.high) == (0, 0, 0)
    assert not found.is_significant


def test_the_correlation_of_numbers_is_pearson():
    drawn = [random_numbers(300, spread) for spread in (2, 1)]
    found = difference(*(predictions("numbers", rows) for rows in drawn))
    expected = [np.corrcoef(*pairs_of(rows))[0, 1] for rows in drawn]
    assert found.score == "pearson"
    assert found.value == pytest.approx(expected[1] - expected[0])
    assert found.is_significant


def test_the_loss_is_weighted_by_tokens():
    rows = ([{"loss": 1.0, "tokens": 1}, {"loss": loss, "tokens": 3}] for loss in (3.0, 1.0))
    found = difference(*(predictions("losses", each) for each in rows))
    assert found.value == pytest.approx(1.0 - 2.5)


@pytest.mark.parametrize(("kind", "field"), [("losses", "loss"), ("numbers", "prediction")])
def test_a_run_that_diverged_differs_by_a_finite_number(kind, field):
    rows = [dict(row) for row in ROWS[kind]]
    rows[1][field] = rows[2][field] = 1e308  # infinity, in a predictions file
    found = difference(predictions(kind), predictions(kind, rows))
    assert np.isfinite([found.value, found.low, found.high]).all()
    assert found.value > 1e50 if kind == "losses" else -2 <= found.value < 0

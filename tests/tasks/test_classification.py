"""classification and regression: examples, rows, predictions, metrics."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.classification import Number, Scored


def test_texts_and_pairs_are_one_row_each(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    task, setting = parse_task("classification"), Setting(tokenizer, 8, ("neg", "pos"))
    examples = [Example("the movie", "a film", "pos"), Example("a plot", "very " * 9, "neg")]
    first, second = task.encode(examples, setting, labelled=True).rows
    assert tokenizer.decode(first["input_ids"]) == "[CLS] the movie [SEP] a film [SEP]"
    assert (first["labels"], second["labels"]) == (1, 0)
    assert len(second["input_ids"]) == 8, "truncated"
    assert "labels" not in task.encode(examples, setting, labelled=False).rows[0]


def test_predictions_are_softmax_and_in_the_order_of_the_examples(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    model, _ = ah.load_backbone(str(backbones("bert")), task="classification", labels=["a", "b"])
    task, setting = parse_task("classification"), Setting(tokenizer, 16, ("a", "b"))
    examples = [Example("the movie was very good"), Example("bad"), Example("a film")]
    together = task.predict(model, task.encode(examples, setting, labelled=False), 2)
    for example, prediction in zip(examples, together, strict=True):
        (alone,) = task.predict(model, task.encode([example], setting, labelled=False), 1)
        assert prediction.scores == pytest.approx(alone.scores, abs=1e-5)
        assert sum(prediction.scores.values()) == pytest.approx(1)
        assert prediction.scores[prediction.label] == max(prediction.scores.values())
        assert str(prediction).startswith(f"{prediction.label} 0.")


def test_metrics_compare_classes_and_numbers():
    scored = [Scored(label, {"a": 0.5, "b": 0.5}) for label in ("a", "b")]
    examples = [Example("x", None, "a"), Example("y", None, "a")]
    assert parse_task("classification").metrics(examples, scored)["accuracy"] == 0.5
    numbers = [Number(2.0), Number(4.0)]
    examples = [Example("x", None, 1.0), Example("y", None, 2.0)]
    assert parse_task("regression").metrics(examples, numbers)["mse"] == pytest.approx(2.5)


def test_a_pair_needs_a_second_text():
    task = parse_task("classification")
    assert task.fields(DataOptions()) == 1
    assert task.fields(DataOptions(pair="other")) == 2
    with pytest.raises(DataError, match="second text is missing"):
        task.example(["one"], DataOptions(pair="other"))
    assert task.shown(Example("one", "two")) == ["one", "two"]


def test_labels_are_sorted_and_checked():
    task = parse_task("classification")
    assert task.labels([Example("x", None, "pos"), Example("y", None, "neg")]) == ("neg", "pos")
    with pytest.raises(DataError, match="two or more classes"):
        task.check(("pos",), [])
    with pytest.raises(DataError, match="'other'"):
        task.check(("neg", "pos"), [Example("x", None, "other")])

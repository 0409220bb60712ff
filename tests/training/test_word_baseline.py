"""A run beside a bag of words on the same rows: who is better, and what is not compared."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from unittest.mock import Mock

import pytest

from adapterhub.data.examples import Example, data_hash
from adapterhub.data.options import DataOptions
from adapterhub.pages.page import BAG_OF_WORDS, WordsComparison, recorded_words
from adapterhub.pages.row_scores import PredictionFile
from adapterhub.tasks import parse_task
from adapterhub.training import word_baseline
from adapterhub.training.run_data import RunData
from adapterhub.training.word_baseline import compare_with_words

NOISE = random.Random(0)
WORDS = ("bad", "fine", "good")


def rows_of(kind, count, hidden=0.0):
    """Return texts whose word is their label, but for a share of them."""
    rows = []
    for n in range(count):
        label = n % 3
        seen = label if NOISE.random() >= hidden else NOISE.randrange(3)
        text = f"the film {n % 7} was {WORDS[seen]}"
        rows.append(Example(text, None, float(label) if kind == "numbers" else WORDS[label]))
    return rows


def data_of(kind, train, rows):
    task = parse_task("regression" if kind == "numbers" else "classification")
    return RunData(task, (), train, rows, DataOptions())


def predicted(kind, rows, right, metric=""):
    """Return the predictions of a run of which a share is right."""
    outcomes = []
    for n, row in enumerate(rows):
        label = row.label if n < right * len(rows) else rows[n - 1].label
        own = {"id": n, "texts": [row.text], "label": row.label, "prediction": label}
        outcomes.append(own | ({"score": 0.5} if kind == "classes" else {}))
    return PredictionFile(kind, "task", 1, data_hash(rows), metric, WORDS, outcomes)


@pytest.mark.parametrize(
    ("kind", "hidden", "right", "told"),
    [
        ("classes", 0.6, 1.0, "adapter: better, +"),
        ("classes", 0.0, 1.0, "adapter: not shown to be better, +0.000"),
        ("classes", 0.0, 0.4, "adapter: worse, -"),
        ("numbers", 0.6, 1.0, "adapter: better, +"),
    ],
)
def test_who_is_better(kind, hidden, right, told):
    train, rows = rows_of(kind, 90), rows_of(kind, 90, hidden)
    metric = "pearson" if kind == "numbers" else "macro_f1"
    own = predicted(kind, rows, right, metric)
    found = compare_with_words(data_of(kind, train, rows), rows, own)
    assert found.lines[1].startswith(told), found.lines
    assert f"has {metric} {found.value:.4f} on the same 90 rows" in found.lines[0]
    assert found.low <= found.difference <= found.high
    signs = {"difference": -found.difference, "low": -found.high, "high": -found.low}
    by_loss = replace(found, score="mse", **signs)
    assert by_loss.lines[1].partition(",")[0] == found.lines[1].partition(",")[0]


def test_what_is_not_compared(monkeypatch):
    monkeypatch.setattr(word_baseline, "_STEPS", 1)  # it does not converge, of which nobody is told
    train, rows = rows_of("classes", 30), rows_of("classes", 12)
    data, own = data_of("classes", train, rows), predicted("classes", rows, 1.0)
    few = compare_with_words(data, rows, own)
    assert few.lines[1].endswith(", of too few rows to compare")
    one = [replace(each, label="good") for each in train]
    assert "one class" in compare_with_words(data_of("classes", one, rows), rows, own).skipped
    monkeypatch.setattr(word_baseline, "MOST_FITTED", 29)
    assert compare_with_words(data, rows, own).lines == (
        "no bag of words was fitted:",
        "30 training rows, 784 characters, 3 classes are too many",
    )
    for other in (
        compare_with_words(data, rows, None),
        compare_with_words(data, rows[1:], own),  # predictions of other rows
        compare_with_words(replace(data, task=parse_task("tagging")), rows, own),
        compare_with_words(replace(data, parts={"a": data}), rows, own),
    ):
        assert other is None


def test_a_record_is_read_as_it_was_written_and_others_are_left_out(tmp_path):
    assert recorded_words(tmp_path) is None
    for found in (
        WordsComparison("accuracy", 0.5, 30, -0.25, -0.5, 0.125),
        WordsComparison("mse", 1.0, 3),
        WordsComparison(skipped="large"),
    ):
        (tmp_path / BAG_OF_WORDS).write_text(json.dumps(found.record()))
        assert recorded_words(tmp_path) == found
    numbers = {"value": 1, "rows": 1, "difference": 1}
    wrong = ({"score": "a"}, {"score": 1, **numbers}, {"skipped": "x" * 5000}, [1])
    for text in ("{", *map(json.dumps, wrong)):
        (tmp_path / BAG_OF_WORDS).write_text(text)
        assert recorded_words(tmp_path) is None


def test_the_runs_of_a_sweep_fit_equal_rows_once(monkeypatch):
    fits = Mock(wraps=word_baseline._fitted)
    monkeypatch.setattr(word_baseline, "_fitted", fits)
    train, rows, others = (rows_of("classes", count) for count in (41, 43, 45))
    for trained, right, count in ((train, 1.0, 1), (train, 0.5, 1), (others, 1.0, 2)):
        own = predicted("classes", rows, right)
        compare_with_words(data_of("classes", trained, rows), rows, own)
        assert fits.call_count == count

"""Constant predictions: what they predict, for each kind of task that has one, and their file."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from adapterhub.bench import baselines
from adapterhub.bench.baselines import (
    CONSTANTS,
    BagOfWords,
    Constant,
    bag_of_words,
    constant_of,
    read_bags_of_words,
    read_constants,
    write_baselines,
)
from adapterhub.bench.records import PredictedRows
from adapterhub.data.examples import Example
from adapterhub.errors import FileError
from adapterhub.pages.row_scores import KINDS, calibration, row_score


def accuracy(rows: PredictedRows, metric: str = "") -> float:
    score = row_score(rows.kind, metric)
    return float(score.summarize(score.columns(rows.outcomes()).sum(0)))


def test_the_majority_class_is_right_as_often_as_it_occurs():
    train = [Example("x", None, label) for label in ("a", "b", "b", "c")]
    constant = constant_of("classes", train)
    assert constant == Constant("majority class", "classes", "b", 0.5)
    test = PredictedRows("classes", {"label": ["a", "b", "b", "a"], "prediction": ["a"] * 4,
                                     "score": [1.0] * 4})  # fmt: skip
    found = constant.predict(test)
    assert found.columns["prediction"] == ["b"] * 4
    assert accuracy(found) == 0.5
    assert accuracy(found, "matthews") == 0.0
    assert calibration(found.outcomes())[1] == 0.0  # its probability is the training share
    assert constant_of("classes", train[1::-1]).value == "a", "of equally frequent ones the first"


def test_the_mean_of_numbers_has_no_correlation_and_the_variance_as_its_error():
    constant = constant_of("numbers", [Example("x", None, n) for n in (1.0, 2.0, 6.0)])
    assert (constant.name, constant.value) == ("mean", 3.0)
    found = constant.predict(PredictedRows("numbers", {"label": [2.0, 4.0], "prediction": [0, 0]}))
    assert accuracy(found) == 0.0
    assert accuracy(found, "mse") == 1.0


def test_the_most_frequent_labels_of_several():
    train = [SimpleNamespace(labels=labels) for labels in (("b", "a"), ("a", "b"), ("a",), ())]
    constant = constant_of("sets", train)
    assert (constant.value, constant.share) == (["a", "b"], 0.5)
    rows = PredictedRows("sets", {"label": [["a"], ["a", "b"]], "prediction": [[], []]})
    assert accuracy(constant.predict(rows), "exact_match") == 0.5


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"classes", "numbers", "sets"}))
def test_other_kinds_have_none(kind):
    assert constant_of(kind, [Example("x", None, "a")]) is None
    assert constant_of("classes", []) is None


def rows_of(kind: str, test: list[Example]) -> PredictedRows:
    empty = {"prediction": [None] * len(test)} | (
        {"score": [0.0] * len(test)} if kind == "classes" else {}
    )
    return PredictedRows(kind, {"label": [each.label for each in test]} | empty)


@pytest.mark.parametrize("pair", [False, True])
def test_a_bag_of_words_learns_what_words_say_and_not_their_order(pair):
    """In a second text as in the first."""
    films = [
        f"the {what} was {how}" for what in ("film", "plot", "cast") for how in ("bad", "fine")
    ]
    train = [Example("x" if pair else t, t if pair else None, t.split()[-1]) for t in films * 4]
    orders = [Example("a b", None, "ab"), Example("b a", None, "ba")]
    found = bag_of_words("classes", {len(train): train, 8: train[:8]}, train[::-1])
    for number in (len(train), 8):
        assert accuracy(found.predict(rows_of("classes", train[::-1]), number)) == 1.0
    assert found.predict(rows_of("classes", train), 7) is None
    assert bag_of_words("classes", {2: orders}, orders) is not None
    assert bag_of_words("classes", {2: train[:1] * 2}, train) is None, "one class"
    assert bag_of_words("classes", {2: [SimpleNamespace(label="a")] * 2}, train) is None


def test_a_bag_of_words_is_fitted_again_only_to_other_rows(monkeypatch):
    train = [Example(f"{label} film {n}", None, label) for n in range(4) for label in ("a", "b")]
    known = bag_of_words("classes", {8: train, 4: train[:4]}, train)
    fitted = []
    monkeypatch.setattr(baselines, "predict_by_words", lambda *rows: fitted.append(rows))
    same = ({4: train[:4], 8: list(train)}, list(train))
    assert bag_of_words("classes", *same, known) is known
    assert not fitted
    for rows, test in (
        ({8: train}, train),
        (same[0], train[1:]),
        ({4: train[4:], 8: train}, train),
    ):
        assert bag_of_words("classes", rows, test, known) is None
    assert len(fitted) == 5


def test_a_bag_of_words_estimates_numbers():
    train = [Example("good " * n + "bad " * (8 - n), None, float(n)) for n in range(9)] * 4
    found = bag_of_words("numbers", {len(train): train}, train)
    predicted = found.predict(rows_of("numbers", train), len(train)).columns["prediction"]
    errors = [abs(a - b.label) for a, b in zip(predicted, train, strict=True)]
    assert sum(errors) / len(errors) < 0.5


def test_constants_are_kept_in_the_folder_of_a_study(tmp_path):
    constants = {"one": Constant("majority class", "classes", "b", 0.5),
                 "two": Constant("mean", "numbers", 3.0)}  # fmt: skip
    words = {"one": BagOfWords("classes", {8: {"prediction": ["b"], "score": [0.5]}}, "d")}
    assert read_constants(tmp_path) == read_bags_of_words(tmp_path) == {}
    write_baselines(tmp_path, constants, words)
    assert read_constants(tmp_path) == constants
    assert read_bags_of_words(tmp_path) == words
    (tmp_path / CONSTANTS).write_text("[1]")
    with pytest.raises(FileError, match="delete"):
        read_constants(tmp_path)

"""Constant predictions: what they predict, for each kind of task that has one, and their file."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from adapterhub.bench.baselines import (
    CONSTANTS,
    Constant,
    constant_of,
    read_constants,
    write_constants,
)
from adapterhub.bench.records import PredictedRows
from adapterhub.data.examples import Example
from adapterhub.errors import FileError
from adapterhub.pages.predictions import KINDS
from adapterhub.pages.row_scores import row_score
from adapterhub.pages.statistics import calibration


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


def test_of_equally_frequent_classes_the_first_is_taken():
    train = [Example("x", None, label) for label in ("b", "a")]
    assert constant_of("classes", train).value == "a"


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


def test_without_rows_there_is_none():
    assert constant_of("classes", []) is None


def test_constants_are_kept_in_the_folder_of_a_study(tmp_path):
    constants = {"one": Constant("majority class", "classes", "b", 0.5),
                 "two": Constant("mean", "numbers", 3.0)}  # fmt: skip
    assert read_constants(tmp_path) == {}
    write_constants(tmp_path, constants)
    assert read_constants(tmp_path) == constants
    (tmp_path / CONSTANTS).write_text("[1]")
    with pytest.raises(FileError, match="delete"):
        read_constants(tmp_path)

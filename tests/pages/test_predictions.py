"""predictions.jsonl: what is written is read back; broken files are refused by name."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from adapterhub.data.examples import Example, data_hash
from adapterhub.errors import FileError
from adapterhub.pages.row_scores import KINDS, PREDICTIONS, outcomes_of, read_predictions
from adapterhub.tasks import TASKS, parse_task
from adapterhub.tasks.classification import Number, Scored
from tests.kit.runs import ROWS, predictions


def test_every_kind_has_rows_here():
    assert set(ROWS) == set(KINDS)


def test_every_task_has_a_kind_of_outcome():
    assert len(TASKS) > 8
    assert {cls().outcomes for cls in TASKS.values()} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_read_back(kind, tmp_path):
    file = predictions(kind)
    (tmp_path / PREDICTIONS).write_bytes(file.to_bytes())
    assert read_predictions(tmp_path) == file


def test_a_folder_without_the_file_has_no_predictions(tmp_path):
    assert read_predictions(tmp_path) is None


def test_outcomes_hold_texts_label_prediction_and_score():
    examples = [Example("a", label="pos"), Example("b", "c", "neg")]
    given = [Scored("pos", {"pos": 0.8, "neg": 0.2}), Scored("pos", {"pos": 0.6, "neg": 0.4})]
    file = outcomes_of(parse_task("classification"), examples, given, ("neg", "pos"), 7)
    assert file is not None
    assert (file.kind, file.step, file.data) == ("classes", 7, data_hash(examples))
    assert file.rows[1] == {
        "id": 1, "texts": ["b", "c"], "label": "neg", "prediction": "pos", "score": 0.6
    }  # fmt: skip


def test_without_one_prediction_for_each_example_there_is_no_file():
    assert outcomes_of(parse_task("classification"), [Example("a", label="x")], [], (), 1) is None


def test_long_texts_are_cut_and_numbers_are_json():
    examples = [Example("x" * 10_000, label=1.0)]
    file = outcomes_of(parse_task("regression"), examples, [Number(math.nan)], (), 1)
    assert file is not None
    assert len(file.rows[0]["texts"][0]) < 5000
    assert file.rows[0]["prediction"] == 1e308
    for line in file.to_bytes().splitlines():
        json.loads(line, parse_constant=pytest.fail)


BROKEN = {
    "a cut file": lambda data: data[:-20],
    "fewer rows": lambda data: data[: data.rindex(b"\n", 0, -1) + 1],
    "no rows": lambda data: data.splitlines()[0].replace(b'"rows": 4', b'"rows": 0') + b"\n",
    "a newer format": lambda data: data.replace(b'"format": 1', b'"format": 2'),
    "an unknown kind": lambda data: data.replace(b'"classes"', b'"pictures"'),
    "another type": lambda data: data.replace(b'"score": 0.6', b'"score": "0.6"'),
    "a missing field": lambda data: data.replace(b'"prediction"', b'"predicted"'),
    "texts that are none": lambda data: data.replace(b'["a good movie"]', b"[1]"),
    "no JSON": lambda data: b"\xff" + data,
    "a list": lambda data: b"[]\n" + data,
    "deep nesting": lambda data: b"[" * 100_000 + data,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused(name, tmp_path):
    path = tmp_path / PREDICTIONS
    path.write_bytes(BROKEN[name](predictions("classes").to_bytes()))
    with pytest.raises(FileError, match="is broken"):
        read_predictions(tmp_path)


def test_broken_spans_are_refused(tmp_path):
    for span in (["per", 3, 1], ["per", -1, 2], [1, 0, 1], ["per", "0", 1], ["per"], 3):
        rows = [{"label": [span], "prediction": []}]
        (tmp_path / PREDICTIONS).write_bytes(predictions("spans", rows).to_bytes())
        with pytest.raises(FileError, match="is broken"):
            read_predictions(tmp_path)


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "other").write_bytes(replace(predictions("texts")).to_bytes())
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

"""`--labels`: names of labels in training, evaluation, prediction and the adapter's files."""

from __future__ import annotations

import json

import pytest

from adapterhub.files.native import Saved
from tests.kit.data import json_lines, sentences, write_json_lines, write_tsv
from tests.kit.session import refused, succeeded

NAMES = {"0": "bad film", "1": "good film"}
LEARN = ("train.epochs=1", "train.tensorboard=false")


def rows(values):
    return [(text, values[label == "pos"]) for text, label in sentences(48)]


@pytest.fixture
def trained(adapterhub, backbone, tmp_path):
    runs = iter(("run", "second", "third"))

    def train(task: str, file, labels: str, *words: str):
        return adapterhub(
            "train", "--backbone", backbone, "--task", task, "--train", file, "--eval", file,
            "--output", tmp_path / next(runs), "--labels", labels, *LEARN, *words,
        )  # fmt: skip

    return train


def test_names_are_shown_and_values_are_read(trained, adapterhub, tmp_path):
    numbers = write_tsv(tmp_path / "numbers.tsv", rows(("0", "1")))
    code, _, err = trained("classification", numbers, "0=bad film,1=good film")
    assert code == 0, err
    assert "--labels" not in err
    manifest = Saved.at(tmp_path / "run/adapter").manifest
    assert manifest.labels == ("bad film", "good film")
    assert manifest.training["recipe"]["data"]["labels"] == NAMES
    named = write_tsv(tmp_path / "named.tsv", rows(("bad film", "good film")))
    scores = []
    for file in (numbers, named):
        out = succeeded(adapterhub("eval", tmp_path / "run", "--data", file, "--json"))
        scores.append(json.loads(out))
    assert scores[0] == scores[1]
    code, out, _ = adapterhub("predict", tmp_path / "run", "the movie was bad", "--json")
    (row,) = json_lines(out)
    assert row["scores"].keys() == {"bad film", "good film"}
    other = write_tsv(tmp_path / "other.tsv", rows(("0", "7")))
    words = ("eval", tmp_path / "run", "--data", other)
    refused(adapterhub(*words), "'7': 24 times", "--labels 0=bad film,1=good film,7=NAME")
    file = write_tsv(tmp_path / "a.tsv", sentences(48))  # a list is the order of the logits
    succeeded(trained("classification", file, "pos,neg", "train.max_steps=1"))
    assert Saved.at(tmp_path / "second/adapter").manifest.labels == ("pos", "neg")


def test_tags_may_be_numbers(trained, tmp_path):
    sentence = {"text": ["the", "movie", "was", "good"], "label": [0, 1, 0, 0]}
    file = write_json_lines(tmp_path / "tags.jsonl", [sentence] * 8)
    succeeded(trained("tagging", file, "0=O,1=B-thing,2=I-thing", "train.max_steps=1"))
    assert Saved.at(tmp_path / "run/adapter").manifest.labels == ("O", "B-thing", "I-thing")
    refused(
        trained("tagging", file, "0=O,2=B-thing", "train.max_steps=1"),
        "the tag '1' has no name in --labels",
    )
    refused(trained("tagging", file, "", "train.max_steps=1"), "--labels 0=O,1=B-PER")


def test_bare_numbers_get_a_note_and_other_tasks_an_error(trained, tmp_path):
    file = write_tsv(tmp_path / "numbers.tsv", rows(("0", "1")))
    code, _, err = trained("classification", file, "", "train.max_steps=1")
    assert code == 0, err
    assert "the labels are numbers (0, 1); --labels 0=NAME,1=NAME names them" in err
    recorded = Saved.at(tmp_path / "run/adapter").manifest.training["recipe"]
    assert "labels" not in recorded["data"]
    assert recorded["task"] == "classification"
    refused(trained("regression", file, "0=a,1=b"), "regression has no labels to name")

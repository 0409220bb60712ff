"""multiple-choice: choices in columns or lists, and batches of pairs."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

import adapterhub as ah
from adapterhub.data.options import DataOptions
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.multiple_choice import Choices


@pytest.mark.parametrize("label", ["B", 1, "1", "y"])
def test_choices_in_a_list_and_in_columns(tmp_path, label):
    row = {"text": "a", "choices": ["x", "y"], "label": label}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    task = parse_task("multiple-choice")
    expected = [Choices("a", ("x", "y"), 1)]
    assert task.read(str(tmp_path / "a.jsonl"), DataOptions(), "train") == expected
    (tmp_path / "a.tsv").write_text(f"text\tone\tother\tlabel\na\tx\ty\t{label}\n")
    options = DataOptions(choices=("one", "other"))
    assert task.read(str(tmp_path / "a.tsv"), options, "train") == expected


def test_choices_are_pairs_of_one_row(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    examples = [Choices("the movie", ("good", "very bad"), 1), Choices("a", ("dull", "fine"), 0)]
    encoded = parse_task("multiple-choice").encode(examples, Setting(tokenizer, 16), labelled=True)
    batch = encoded.batch([0, 1])
    assert batch["input_ids"].shape == (2, 2, 7)
    assert batch["labels"].tolist() == [1, 0]
    assert tokenizer.decode(batch["input_ids"][0, 1]) == "[CLS] the movie [SEP] very bad [SEP]"


def test_examples_with_different_numbers_of_choices_are_predicted(backbones):
    model, tokenizer = ah.load_backbone(str(backbones("bert")), task="multiple-choice")
    task, setting = parse_task("multiple-choice"), Setting(tokenizer, 16)
    examples = [Choices("the movie", ("good", "bad")), Choices("a film", ("good", "bad", "dull"))]
    predictions = task.predict(model, task.encode(examples, setting, labelled=False), 8)
    for example, prediction in zip(examples, predictions, strict=True):
        assert len(prediction.scores) == len(example.choices)
        assert prediction.text == example.choices[prediction.index]
        assert prediction.scores[prediction.index] == max(prediction.scores)

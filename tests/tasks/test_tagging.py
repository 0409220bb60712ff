"""tagging: CoNLL columns, word pieces, entities."""

from __future__ import annotations

import json

import datasets
import pytest
from transformers import BertTokenizerFast

from adapterhub.data.options import DataOptions
from adapterhub.errors import AdapterhubError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common.batches import IGNORED
from adapterhub.tasks.tagging import Sentence, entities
from tests.kit.data import words_of

TAGGED = Sentence("New York is", ("New", "York", "is"), ("B-x", "I-x", "O"))


@pytest.mark.parametrize(
    "text",
    [
        "New\tB-x\nYork\tI-x\nis\tO\n\t\n",
        "-DOCSTART- -X- O\n\nNew NNP B-x\nYork NNP I-x\nis VB O\n\n",
        "New\tB-x\r\nYork\tI-x\r\nis\tO\r\n\t\r\n",
    ],
)
def test_conll_columns(tmp_path, text):
    (tmp_path / "a.conll").write_bytes((text + text).encode())
    task, source = parse_task("tagging"), str(tmp_path / "a.conll")
    assert task.read(source, DataOptions(), "train") == [TAGGED, TAGGED]
    assert task.read(source, DataOptions(), "eval", labelled=False)[1].tags is None


def test_lists_of_tokens_and_tags(tmp_path, monkeypatch):
    row = {"tokens": TAGGED.tokens, "tags": TAGGED.tags}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    options = DataOptions(text="tokens", label="tags")
    assert parse_task("tagging").read(str(tmp_path / "a.jsonl"), options, "train") == [TAGGED]
    kinds = datasets.Features(
        {
            "tokens": datasets.List(datasets.Value("string")),
            "tags": datasets.List(datasets.ClassLabel(names=["O", "B-x", "I-x"])),
        }
    )
    table = datasets.Dataset.from_dict({"tokens": [TAGGED.tokens], "tags": [[1, 2, 0]]}, kinds)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: table)
    assert parse_task("tagging").read("acme/tags", options, "train") == [TAGGED]


@pytest.fixture
def pieces(tmp_path) -> BertTokenizerFast:
    """A tokenizer that cuts words into pieces."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "york", "##shire", "new", "in", "##er"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    return BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"))


def test_a_tag_is_on_the_first_piece_of_its_word(pieces):
    sentence = Sentence("in newer yorkshire", ("in", "newer", "yorkshire"), ("O", "B-x", "I-x"))
    task = parse_task("tagging")
    setting = Setting(pieces, 32, task.labels([sentence]))
    (row,) = task.encode([sentence], setting, labelled=True).rows
    assert words_of(pieces, row["input_ids"])[1:-1] == ["in", "new", "##er", "york", "##shire"]
    assert row["labels"] == [IGNORED, 0, 1, IGNORED, 2, IGNORED, IGNORED]
    assert task.labels([sentence]) == ("O", "B-x", "I-x")


def test_entities_are_spans_of_the_text():
    sentence = Sentence("New  York, new York", ("New", "York", ",", "new", "York"))
    found = entities(sentence, ["B-x", "I-x", "O", "B-x", "B-x"])
    assert [(e.kind, e.text, e.start, e.end) for e in found] == [
        ("x", "New  York", 0, 9),
        ("x", "new", 11, 14),
        ("x", "York", 15, 19),
    ]
    assert [e.kind for e in entities(sentence, ["I-x", "I-y", "O", "O", "I-y"])] == ["x", "y", "y"]


def test_the_score_of_an_entity_is_the_mean_of_its_tags():
    sentence = Sentence("New York or Rome", ("New", "York", "or", "Rome"))
    found = entities(sentence, ["B-x", "I-x", "O", "B-x"], [0.5, 1.0, 0.9, 0.7])
    assert [each.score for each in found] == [0.75, 0.7]


def test_tags_that_training_lacks():
    task = parse_task("tagging")
    with pytest.raises(AdapterhubError, match="'B-x': 1 time"):
        task.check(("O", "B-y", "I-y"), [Sentence("a", ("a",), ("B-x",))])
    with pytest.raises(AdapterhubError, match="every tag is O"):
        task.check(("O",), [])

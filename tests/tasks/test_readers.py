"""Readers of each form that a task takes."""

from __future__ import annotations

import gzip
import json

import datasets
import pytest

from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.tasks import parse_task
from adapterhub.tasks.causal_lm import Chat
from adapterhub.tasks.multiple_choice import Choices
from adapterhub.tasks.question_answering import Question
from adapterhub.tasks.tagging import Sentence

TAGGED = Sentence("New York is", ("New", "York", "is"), ("B-x", "I-x", "O"))


@pytest.mark.parametrize(
    "text",
    [
        "New\tB-x\nYork\tI-x\nis\tO\n\t\n",
        "-DOCSTART- -X- O\n\nNew NNP B-x\nYork NNP I-x\nis VB O\n\n",
        "New\tB-x\r\nYork\tI-x\r\nis\tO\r\n\t\r\n",
    ],
)
def test_conll(tmp_path, text):
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


def test_squad_and_columns(tmp_path):
    answer = {"text": "good", "answer_start": 4}
    paragraph = {"context": "the good film", "qas": [
        {"id": "1", "question": "what", "answers": [answer, answer]},
        {"id": "2", "question": "who", "answers": [], "is_impossible": True},
    ]}  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}, indent=1))
    task = parse_task("question-answering(unanswerable=true)")
    first, second = task.read(str(tmp_path / "a.json"), DataOptions(), "train")
    assert first == Question("what", "the good film", (("good", 4), ("good", 4)))
    assert second == Question("who", "the good film", ())
    rows = [
        {"question": "what", "context": "the good film",
         "answers": {"text": ["good"] * n, "answer_start": [4] * n}}
        for n in (2, 0)
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = DataOptions(text="question", label="answers")
    found = task.read(str(tmp_path / "a.jsonl"), options, "train")
    assert [q.answers for q in found] == [first.answers, ()]


def test_parallel_files_and_columns(tmp_path):
    for name, lines in (("en", "one\n\ntwo\n"), ("de", "eins\nnull\r\nzwei\n")):
        (tmp_path / f"a.{name}.gz").write_bytes(gzip.compress(lines.encode()))
    options = DataOptions(eval_target=str(tmp_path / "a.de.gz"))
    task, source = parse_task("seq2seq"), str(tmp_path / "a.en.gz")
    pairs = (("one", "eins"), ("", "null"), ("two", "zwei"))
    expected = [Example(text, None, target) for text, target in pairs]
    assert task.read(source, options, "eval") == expected
    (tmp_path / "a.tsv").write_text("en\tde\none\teins\n")
    columns = DataOptions(text="en", label="de")
    assert task.read(str(tmp_path / "a.tsv"), columns, "train") == expected[:1]


def test_chats_and_raw_text(tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}))
    options = DataOptions(text="messages")
    found = parse_task("causal-lm(data=chat)").read(str(tmp_path / "a.jsonl"), options, "train")
    assert found == [Chat((("user", "a"), ("assistant", "b")))]
    (tmp_path / "a.txt").write_text("one\n\n two \r\n")
    for spec in ("causal-lm(data=text)", "masked-lm", "span-corruption"):
        found = parse_task(spec).read(str(tmp_path / "a.txt"), DataOptions(), "train")
        assert found == [Example("one"), Example(" two ")]


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

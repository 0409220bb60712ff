"""question-answering: SQuAD's format, windows, spans."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.question_answering import Question
from tests.kit.data import words_of


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


def test_a_long_context_is_split_into_overlapping_windows(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    context = " ".join(["the movie was very dull a film is good"] * 5)
    answer = context.rindex("good")
    question = Question("a plot", context, (("good", answer),))
    task = parse_task("question-answering(stride=4)")
    encoded = task.encode([question], Setting(tokenizer, 24), labelled=True)
    assert len(encoded.rows) > 2
    assert set(encoded.owners) == {0}
    assert all(len(row["input_ids"]) <= 24 for row in encoded.rows)
    read = [o for row in encoded.rows for o in row["offsets"] if o]
    assert {i for a, b in read for i in range(a, b)} >= {
        i for i, c in enumerate(context) if c != " "
    }
    assert len(read) > len(set(read)), "windows overlap"
    spans = [(row["start_positions"], row["end_positions"]) for row in encoded.rows]
    assert spans[0] == (0, 0)
    start, end = spans[-1]
    assert words_of(tokenizer, encoded.rows[-1]["input_ids"][start : end + 1]) == ["good"]
    # A long question leaves room for the context.
    long = Question("very " * 50, "the movie was good", (("good", 14),))
    encoded = parse_task("question-answering").encode([long], Setting(tokenizer, 24), labelled=True)
    assert any(row["start_positions"] for row in encoded.rows)


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_of_answers_follow_the_padding(backbones, side):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"), padding_side=side)
    contexts = ["the movie was very dull a good film", "a good film"]
    questions = [Question("is", each, (("good", each.index("good")),)) for each in contexts]
    task = parse_task("question-answering")
    batch = task.encode(questions, Setting(tokenizer, 32), labelled=True).batch([0, 1])
    for i in range(2):
        span = slice(batch["start_positions"][i], batch["end_positions"][i] + 1)
        assert words_of(tokenizer, batch["input_ids"][i, span].tolist()) == ["good"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_best_span_over_all_windows_answers(backbones, side):
    """With the logits of a stub model: the best span inside the context that is not too long,
    or none."""
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"), padding_side=side)

    class Stub(torch.nn.Module):
        device = torch.device("cpu")

        def __init__(self, null: float) -> None:
            super().__init__()
            self.null = null

        def forward(self, input_ids, **_):
            word = tokenizer.convert_tokens_to_ids("good")
            start = (input_ids == word) * 3.0 + (input_ids == tokenizer.sep_token_id) * 9.0
            start[input_ids == tokenizer.cls_token_id] = self.null
            return {"start_logits": start, "end_logits": start.clone()}

    contexts = ("the movie was very dull a good film", "a good film")
    questions = [Question("is good", context, None) for context in contexts]
    for spec, null, expected in (
        ("question-answering", 5.0, "good"),
        ("question-answering(unanswerable=true)", 5.0, ""),
        ("question-answering(unanswerable=true)", 2.0, "good"),
        ("question-answering(unanswerable=true, threshold=9.0)", 5.0, "good"),
    ):
        task = parse_task(spec)
        encoded = task.encode(questions, Setting(tokenizer, 32), labelled=False)
        answers = task.predict(Stub(null), encoded, 4)
        for answer, context in zip(answers, contexts, strict=True):
            assert answer.text == expected
            assert context[answer.start : answer.end] == expected


def test_a_question_needs_a_fast_tokenizer_and_room_for_its_context(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    task, question = parse_task("question-answering"), Question("is", "a good film", ())
    with pytest.raises(ConfigError, match="no room for a context"):
        task.encode([question], Setting(tokenizer, 4), labelled=True)
    slow = SimpleNamespace(is_fast=False)
    with pytest.raises(ConfigError, match="a fast tokenizer"):
        task.encode([question], Setting(slow, 32), labelled=True)

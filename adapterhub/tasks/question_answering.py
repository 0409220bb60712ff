"""Extractive question answering: the span of a context that answers a question, or that none does.

SQuAD 1.1 (Rajpurkar et al. 2016, https://arxiv.org/abs/1606.05250) and 2.0 with questions that have
no answer (Rajpurkar et al. 2018, https://arxiv.org/abs/1806.03822). A context longer than the model
takes is read in windows that overlap by `stride` tokens. The score of a span (i, j) is
start_i + end_j (Devlin et al. 2019, sections 4.2 and 4.3, https://arxiv.org/abs/1810.04805): the
best over all windows is the answer, unless the score of no answer, that of the first token, is
higher by more than `threshold` in the window where it is lowest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from adapterhub.config.options import option
from adapterhub.data.examples import read_rows, refuse, text_problem
from adapterhub.data.options import DataOptions
from adapterhub.data.tables import first_few, read_text
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks._base import (
    Encoded,
    Prediction,
    Row,
    Setting,
    Task,
    cut_text,
    forward,
    limit_of,
    register_task,
)
from adapterhub.tasks._metrics import answer_metrics

_NOT_INPUTS = ("offsets",)
_BEST = 20  # starts, and ends, that are tried together


@dataclass(frozen=True)
class Question:
    """A question on a context, and its answers, each a text and where it starts, if known."""

    text: str
    context: str
    answers: tuple[tuple[str, int], ...] | None = None


@dataclass(frozen=True)
class Answer(Prediction):
    """A span of the context, "" for none; the score is that of the span less that of no answer."""

    text: str
    start: int
    end: int
    score: float

    def as_dict(self) -> dict[str, Any]:
        """The span, and its score against no answer."""
        return {"answer": self.text, "start": self.start, "end": self.end, "score": self.score}

    def __str__(self) -> str:
        return self.text.replace("\n", " ") or "-"


@register_task
@dataclass(frozen=True)
class QuestionAnswering(Task):
    """The span of a context that answers a question."""

    unanswerable: bool = option(False, "some questions have no answer, as in SQuAD 2.0")
    stride: int = option(64, "tokens by which two windows of a long context overlap")
    max_answer: int = option(30, "longest answer, in tokens")
    threshold: float = option(0.0, "how much better no answer must score to be given")

    name = "question-answering"
    summary = "the span of a context that answers a question"
    main_metric = "f1"

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Question]:
        """SQuAD's JSON, or columns: text (question), pair (context), label (answers, as
        {text: [...], answer_start: [...]})."""
        if _is_squad(source):
            questions = _read_squad(source, labelled)
        else:
            questions = self._read_columns(source, options, split, labelled)
        open_ones = [q for q in questions if q.answers == ()]
        if open_ones and not self.unanswerable:
            raise DataError(
                f"{source} has questions without an answer",
                offenders=first_few([q.text for q in open_ones]),
                hint="the option unanswerable: --task 'question-answering(unanswerable=true)'",
            )
        return questions

    def _read_columns(
        self, source: str, options: DataOptions, split: str, labelled: bool
    ) -> list[Question]:
        pair = options.pair or "context"

        def build(question: Any, context: Any, answers: Any = None) -> Question:
            refuse(text_problem(question, options.text), text_problem(context, pair))
            if not labelled:
                return Question(question, context)
            if not isinstance(answers, dict) or {"text", "answer_start"} - answers.keys():
                raise ValueError(f"{options.label!r} is not {{text: [...], answer_start: [...]}}")
            spans = tuple(zip(answers["text"], answers["answer_start"], strict=False))
            refuse(*_span_problems(context, spans))
            return Question(question, context, spans)

        columns = [options.text, pair, *[options.label] * labelled]
        return read_rows(source, options, split, columns, build)

    def example(self, fields: Sequence[str], options: DataOptions) -> Question:
        """A question and its context."""
        if len(fields) < 2:
            raise DataError(
                "a question needs a context",
                hint='adapterhub predict DIR "the question" --pair "the context"',
            )
        return Question(fields[0], fields[1])

    def fields(self, options: DataOptions) -> int:
        """The question and the context."""
        return 2

    def encode(self, examples: Sequence[Question], setting: Setting, *, labelled: bool) -> Encoded:
        """A row a window; `offsets` are the characters of each context token, else None."""
        if not setting.tokenizer.is_fast:
            raise ConfigError(
                "question-answering needs a fast tokenizer, which knows where each token stands"
            )
        rows: list[Row] = []
        owners: list[int] = []
        for index, question in enumerate(examples):
            for row in self._windows(question, setting):
                if labelled:
                    row |= _positions(row, question.answers or ())
                rows.append(row)
                owners.append(index)
        return Encoded(self, setting, tuple(examples), rows, tuple(owners))

    def _windows(self, question: Question, setting: Setting) -> Iterator[Row]:
        limit, tokenizer = limit_of(setting), setting.tokenizer
        asked = cut_text(question.text.strip(), tokenizer, limit // 2)
        stride = min(self.stride, limit // 4)
        encoded = tokenizer(
            asked, question.context, truncation="only_second", max_length=limit, stride=stride,
            return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        names = [n for n in encoded if n not in ("offset_mapping", "overflow_to_sample_mapping")]
        for i, offsets in enumerate(encoded["offset_mapping"]):
            spans = zip(offsets, encoded.sequence_ids(i), strict=True)
            row: Row = {name: encoded[name][i] for name in names}
            row["offsets"] = [tuple(o) if part == 1 else None for o, part in spans]
            yield row

    def collate(self, rows: Sequence[Row], setting: Setting) -> Any:
        """Without the offsets; positions move by what is padded on the left."""
        known = [{k: v for k, v in row.items() if k not in _NOT_INPUTS} for row in rows]
        batch = super().collate(known, setting)
        if setting.tokenizer.padding_side == "left" and "start_positions" in batch:
            width = batch["input_ids"].shape[1]
            for i, row in enumerate(known):
                for name in ("start_positions", "end_positions"):
                    batch[name][i] += width - len(row["input_ids"])
        return batch

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """The span with the highest score over all windows."""
        spans: dict[int, list[tuple[float, int, int]]] = {}
        nulls: dict[int, list[float]] = {}
        side = data.setting.tokenizer.padding_side
        for indices, batch, output in forward(model, data, batch_size):
            width = batch["input_ids"].shape[1]
            starts, ends = (
                output[name].float().cpu().numpy() for name in ("start_logits", "end_logits")
            )
            for at, row in enumerate(indices):
                offsets = data.rows[row]["offsets"]
                first = width - len(offsets) if side == "left" else 0
                window = slice(first, first + len(offsets))
                start, end = starts[at, window], ends[at, window]
                owner = data.owners[row]
                spans.setdefault(owner, []).extend(self._spans(start, end, offsets))
                nulls.setdefault(owner, []).append(float(start[0] + end[0]))
        return [
            self._answer(question, spans[i], min(nulls[i]))
            for i, question in enumerate(data.examples)
        ]

    def _spans(self, start: Any, end: Any, offsets: list[Any]) -> Iterator[tuple[float, int, int]]:
        """(score, first character, character after the last) of the best spans of a window."""
        inside = np.array([o is not None and o[1] > o[0] for o in offsets])
        if not inside.any():
            return
        firsts, lasts = (
            np.argsort(-np.where(inside, scores, -np.inf), kind="stable")[:_BEST]
            for scores in (start, end)
        )
        for i in firsts[inside[firsts]]:
            for j in lasts[inside[lasts]]:
                if i <= j < i + self.max_answer:
                    yield float(start[i] + end[j]), offsets[i][0], offsets[j][1]

    def _answer(
        self, question: Question, spans: list[tuple[float, int, int]], null: float
    ) -> Answer:
        score, start, end = max(spans, default=(-np.inf, 0, 0))
        if not spans or (self.unanswerable and null - score > self.threshold):
            return Answer("", 0, 0, float(score - null) if spans else 0.0)
        return Answer(question.context[start:end], start, end, float(score - null))

    def metrics(
        self, examples: Sequence[Question], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """f1 and exact match; with unanswerable questions also on each kind of question."""
        found = [p.text for p in predictions if isinstance(p, Answer)]
        return answer_metrics([[text for text, _ in q.answers or ()] for q in examples], found)

    def shown(self, example: Question) -> list[str]:
        """The question; contexts are long."""
        return [example.text]


def _positions(row: Row, answers: Sequence[tuple[str, int]]) -> dict[str, int]:
    """The tokens where the first answer begins and ends; the first token if it is not all here."""
    offsets = row["offsets"]
    for text, start in answers[:1]:
        end = start + len(text)
        begins = [i for i, o in enumerate(offsets) if o and o[0] <= start < o[1]]
        ends = [i for i, o in enumerate(offsets) if o and o[0] < end <= o[1]]
        if begins and ends:
            return {"start_positions": begins[0], "end_positions": ends[-1]}
    return {"start_positions": 0, "end_positions": 0}


def _is_squad(source: str) -> bool:
    """Whether a file is one JSON object, as SQuAD's are, and not JSON lines."""
    if not source.lower().removesuffix(".gz").endswith(".json") or not Path(source).is_file():
        return False
    try:
        return isinstance(json.loads(read_text(source)), dict)
    except ValueError:
        return False


def _read_squad(source: str, labelled: bool) -> list[Question]:
    questions: list[Question] = []
    wrong: list[str] = []
    try:
        for article in json.loads(read_text(source))["data"]:
            for paragraph in article["paragraphs"]:
                for item in paragraph["qas"]:
                    question, problems = _squad_question(item, paragraph["context"], labelled)
                    wrong += [f"question {item.get('id', item['question'])}: {p}" for p in problems]
                    questions.append(question)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{source} is not in SQuAD's form: {type(error).__name__} {error}",
            expected='{"data": [{"paragraphs": [{"context": ..., "qas": [...]}]}]}',
        ) from error
    if wrong:
        raise DataError(f"{source} has questions that cannot be used", offenders=first_few(wrong))
    if not questions:
        raise DataError(f"{source} has no questions")
    return questions


def _squad_question(item: Any, context: str, labelled: bool) -> tuple[Question, list[str]]:
    if not labelled:
        return Question(item["question"], context), []
    if item.get("is_impossible", False):
        return Question(item["question"], context, ()), []
    answers = tuple((a["text"], a["answer_start"]) for a in item["answers"])
    problems = _span_problems(context, answers)
    return Question(item["question"], context, answers), [
        *problems,
        *["it has no answer, and is not marked is_impossible"] * (not answers),
    ]


def _span_problems(context: str, answers: Sequence[tuple[Any, Any]]) -> list[str]:
    """Answers that do not stand in the context where they say."""
    return [
        f"the answer {text!r} does not stand at {start} in the context"
        for text, start in answers
        if not isinstance(start, int) or context[start : start + len(str(text))] != text or not text
    ]

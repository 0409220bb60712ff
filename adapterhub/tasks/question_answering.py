"""Extractive question answering: find the span of a context that answers a question.

    example      a question, a context, and the answers with their positions in it
    row          the question and one window of the context; `start_positions`, `end_positions`
    prediction   the best span over all windows, or "" for no answer
    metrics      word F1 and exact match, by SQuAD's rules

SQuAD 1.1 (Rajpurkar et al. 2016, https://arxiv.org/abs/1606.05250) and 2.0, where questions may
have no answer (Rajpurkar et al. 2018, https://arxiv.org/abs/1806.03822). A context that is too long
is split into windows that overlap by `stride` tokens. The score of a span (i, j) is start_i + end_j
(Devlin et al. 2019, sections 4.2 and 4.3, https://arxiv.org/abs/1810.04805). The best span over all
windows is the answer, unless the score of no answer is higher by more than `threshold`. That score
is the first token's, in the window where it is lowest.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapterhub.config.options import option
from adapterhub.config.user_folders import is_file
from adapterhub.data.columns import WANTS, ColumnChoice, choose_columns
from adapterhub.data.examples import Grouped, read_rows, refuse, text_problem
from adapterhub.data.options import DataOptions
from adapterhub.data.tables import first_few, read_text
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks.common.base import Encoded, Prediction, Task, register_task
from adapterhub.tasks.common.batches import (
    Loss,
    Passed,
    Row,
    Setting,
    cut_text,
    each_row,
    limit_of,
    span_loss,
)
from adapterhub.tasks.common.metrics import answer_metrics
from adapterhub.tasks.common.preview import tokens_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BEST = 20  # candidate starts, and candidate ends, per window

Span = tuple[float, int, int]
"""The score, the first character, and the character after the last one."""


@dataclass(frozen=True)
class Question(Grouped):
    """A question, its context, and its answers as (text, first character), or None."""

    text: str
    context: str
    answers: tuple[tuple[str, int], ...] | None = None


@dataclass(frozen=True)
class Answer(Prediction):
    """A span of the context, or "" for no answer; the score is relative to "no answer"."""

    text: str
    start: int
    end: int
    score: float

    def as_dict(self) -> dict[str, Any]:
        """Return the span and its score."""
        return {"answer": self.text, "start": self.start, "end": self.end, "score": self.score}

    def __str__(self) -> str:
        return self.text.replace("\n", " ") or "-"


@register_task
@dataclass(frozen=True)
class QuestionAnswering(Task):
    """The span of a context that answers a question.

    Rows of `train.jsonl`:

        {"question": "Who?", "context": "Ada.", "answers": {"text": ["Ada"], "answer_start": [0]}}
        {"question": "Who?", "context": "No Al.", "answers": {"text": ["Al"], "answer_start": [3]}}

    These are the columns of SQuAD on the Hub; SQuAD's JSON files can be read as well. With
    `unanswerable: true`, a question without an answer has empty lists.

    `predict` prints the answer, or `-`; `score` is relative to the score of no answer:

        Ada
        {"answer": "Ada", "start": 0, "end": 3, "score": 5.21}
    """

    unanswerable: bool = option(False, "some questions have no answer, as in SQuAD 2.0")
    stride: int = option(64, "tokens by which the windows of a long context overlap")
    max_answer: int = option(30, "longest answer, in tokens")
    threshold: float = option(0.0, "margin by which no answer must score higher")

    name = "question-answering"
    keeps_length = True
    summary = "the span of a context that answers a question"
    main_metric = "f1"
    outcomes = "texts"
    printed_fields = ("answer", "start", "end", "score")
    groups = "contexts"
    columns = WANTS["answers"]

    # Examples

    def fitted(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> tuple[Task, ColumnChoice]:
        """Infer the columns, unless the data is SQuAD's JSON, which has none."""
        if _is_squad(source):
            return self, ColumnChoice(options, notes=(f"{source}: SQuAD's JSON",))
        return super().fitted(source, options, split, labelled=labelled)

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Question]:
        """Read SQuAD's JSON, or columns.

        The columns are text (the question), pair (the context) and label (the answers, as
        {text: [...], answer_start: [...]}).
        """
        if _is_squad(source):
            questions = _read_squad(source, labelled)
        else:
            questions = self._read_columns(source, options, split, labelled)
        unanswered = [q.text for q in questions if q.answers == ()]
        if unanswered and not self.unanswerable:
            raise DataError(
                f"{source} has questions without an answer",
                offenders=first_few(unanswered),
                hint="--task 'question-answering(unanswerable=true)'",
            )
        return questions

    def _read_columns(
        self, source: str, options: DataOptions, split: str, labelled: bool
    ) -> list[Question]:
        choice = choose_columns(source, options, split, self.columns, labelled=labelled)
        options = choice.options
        text, label, pair = options.text_column, options.label_column, options.pair or "context"

        def build(question: Any, context: Any, answers: Any = None) -> Question:
            fields = ((question, text), (context, pair))
            refuse(*(text_problem(v, name, allow_empty=not labelled) for v, name in fields))
            if not labelled:
                return Question(question, context)
            if not isinstance(answers, dict) or {"text", "answer_start"} - answers.keys():
                raise ValueError(f"{label!r} is not {{text: [...], answer_start: [...]}}")
            spans = tuple(zip(answers["text"], answers["answer_start"], strict=False))
            refuse(*_span_problems(context, spans))
            return Question(question, context, spans)

        columns = [text, pair, *[label] * labelled]
        return read_rows(source, options, split, columns, build)

    def example(self, fields: Sequence[str], options: DataOptions) -> Question:
        """Build an example from a question and its context."""
        if len(fields) < 2:
            raise DataError(
                "a question needs a context",
                hint='adapterhub predict ADAPTER "the question" --pair "the context"',
            )
        return Question(fields[0], fields[1])

    def fields(self, options: DataOptions) -> int:
        """Return 2: the question and the context."""
        return 2

    def shown(self, example: Question) -> list[str]:
        """Return the question without its context, which is long."""
        return [example.text]

    def read_texts(self, example: Question) -> list[str]:
        """Return the question and the context."""
        return [example.text, example.context]

    def group_of(self, example: Question) -> Hashable:
        """Return the context, which may have several questions."""
        return example.context

    # Rows

    def rows_of(self, example: Question, setting: Setting, *, labelled: bool) -> list[Row]:
        """Return one row per window; `offsets` are the characters of context tokens, else None."""
        if not setting.tokenizer.is_fast:
            raise ConfigError(
                "question-answering needs a fast tokenizer, which gives the position of each token"
            )
        answers = example.answers or ()
        windows = self._windows(example, setting)
        return [row | (_positions(row, answers) if labelled else {}) for row in windows]

    def _windows(self, question: Question, setting: Setting) -> Iterator[Row]:
        limit, tokenizer = limit_of(setting), setting.tokenizer
        if setting.windows:  # longer for a long question
            words = len(tokenizer(question.text.strip(), verbose=False)["input_ids"])
            limit = min(max(limit, 2 * words), setting.positions, tokenizer.model_max_length)
        text = cut_text(question.text.strip(), tokenizer, limit // 2)  # half is for the context
        room = limit - limit // 2 - tokenizer.num_special_tokens_to_add(pair=True)
        if room < 1:
            raise ConfigError(
                f"train.max_length={limit} leaves no room for a context",
                hint="train.max_length=384",
            )
        stride = min(self.stride, limit // 4, room - 1)
        encoded = tokenizer(
            text, question.context, truncation="only_second", max_length=limit, stride=stride,
            return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        names = [n for n in encoded if n not in ("offset_mapping", "overflow_to_sample_mapping")]
        for i, offsets in enumerate(encoded["offset_mapping"]):
            spans = zip(offsets, encoded.sequence_ids(i), strict=True)
            row: Row = {name: encoded[name][i] for name in names}
            row["offsets"] = [tuple(o) if part == 1 else None for o, part in spans]
            yield row

    def fits(self, row: Row, setting: Setting) -> bool:
        """Return whether the context fits one window with the whole question."""
        limit = limit_of(setting)
        outside = sum(offset is None for offset in row["offsets"])
        return len(row["input_ids"]) <= limit and outside <= limit // 2

    def show_row(self, row: Row, setting: Setting) -> dict[str, str]:
        """Return the tokens of the row and of the answer."""
        ids, tokenizer = row["input_ids"], setting.tokenizer
        start, end = row["start_positions"], row["end_positions"]
        answer = f"{tokens_line(ids[start : end + 1], tokenizer)} (tokens {start} to {end})"
        none = "none in this window: the first token"
        return {"tokens": tokens_line(ids, tokenizer), "answer": answer if end else none}

    def collate(self, rows: Sequence[Row], setting: Setting) -> Any:
        """Pad rows without their offsets; shift positions by the padding on the left."""
        inputs = [{k: v for k, v in row.items() if k != "offsets"} for row in rows]
        batch = super().collate(inputs, setting)
        if setting.tokenizer.padding_side == "left" and "start_positions" in batch:
            width = batch["input_ids"].shape[1]
            for i, row in enumerate(inputs):
                for name in ("start_positions", "end_positions"):
                    batch[name][i] += width - len(row["input_ids"])
        return batch

    def loss(self, train: Encoded) -> Loss | None:
        """Return the loss of the first and the last token of answers."""
        return span_loss

    # Predictions

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Return the span with the highest score over all windows."""
        spans: list[list[Span]] = [[] for _ in data.examples]
        no_answer: list[list[float]] = [[] for _ in data.examples]
        left = data.setting.tokenizer.padding_side == "left"

        def read(passed: Passed) -> Iterator[tuple[list[Span], float]]:
            starts, ends = (
                passed.output[name].float().cpu().numpy() for name in ("start_logits", "end_logits")
            )
            for item, index in enumerate(passed.indices):
                offsets = data.rows[index]["offsets"]
                first = starts.shape[1] - len(offsets) if left else 0
                window = slice(first, first + len(offsets))
                start, end = starts[item, window], ends[item, window]
                yield [*self._spans(start, end, offsets)], float(start[0] + end[0])

        best_spans = each_row(model, data, batch_size, read)
        for owner, (best, without) in zip(data.owners, best_spans, strict=True):
            spans[owner] += best
            no_answer[owner].append(without)
        windows = zip(data.examples, spans, map(min, no_answer), strict=True)
        return [self._answer(*each) for each in windows]

    def _spans(self, start: Any, end: Any, offsets: list[Any]) -> Iterator[Span]:
        """Yield the best spans of a window."""
        import numpy as np  # slow to import

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

    def _answer(self, question: Question, spans: list[Span], no_answer: float) -> Answer:
        if not spans:
            return Answer("", 0, 0, 0.0)
        score, start, end = max(spans)
        margin = float(score - no_answer)
        if self.unanswerable and -margin > self.threshold:
            return Answer("", 0, 0, margin)
        return Answer(question.context[start:end], start, end, margin)

    # Metrics

    def metric_names(self, examples: Sequence[Question]) -> tuple[str, ...]:
        """Return f1 and exact_match, and f1 with and without an answer if there are both."""
        both = len({bool(question.answers) for question in examples}) == 2
        return ("f1", "exact_match", *["has_answer_f1", "no_answer_f1"] * both)

    def metrics(
        self, examples: Sequence[Question], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Compute f1 and exact_match, and f1 with and without an answer if there are both."""
        answers = [[text for text, _ in question.answers or ()] for question in examples]
        return answer_metrics(answers, [p.text for p in predictions if isinstance(p, Answer)])

    def outcome(self, example: Question, prediction: Prediction) -> dict[str, Any]:
        """Return the answers and the predicted one, and the word F1."""
        assert isinstance(prediction, Answer)
        answers = list(dict.fromkeys(text for text, _ in example.answers or ()))
        score = answer_metrics([answers], [prediction.text])["f1"]
        return {
            "texts": [example.text, example.context],
            "label": " / ".join(answers),
            "prediction": prediction.text,
            "score": score,
        }


def _positions(row: Row, answers: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Return the first and last token of the first answer, or token 0 if the window cuts it."""
    offsets = row["offsets"]
    for text, start in answers[:1]:
        end = start + len(text)
        begins = [i for i, o in enumerate(offsets) if o and o[0] <= start < o[1]]
        ends = [i for i, o in enumerate(offsets) if o and o[0] < end <= o[1]]
        if begins and ends:
            return {"start_positions": begins[0], "end_positions": ends[-1]}
    return {"start_positions": 0, "end_positions": 0}


def _is_squad(source: str) -> bool:
    """Return whether a file is one JSON object with paragraphs, as in SQuAD."""
    if not source.lower().removesuffix(".gz").endswith(".json") or not is_file(source):
        return False
    try:
        whole = json.loads(read_text(source))
        articles = whole["data"] if isinstance(whole, dict) else []
        return not articles or "question" not in articles[0]
    except (ValueError, KeyError, TypeError, IndexError):
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
            f"{source} is not in SQuAD's format: {type(error).__name__} {error}",
            expected='{"data": [{"paragraphs": [{"context": ..., "qas": [...]}]}]}',
        ) from error
    if wrong:
        raise DataError(f"{source} has invalid questions", offenders=first_few(wrong))
    if not questions:
        raise DataError(f"{source} has no questions")
    return questions


def _squad_question(item: Any, context: str, labelled: bool) -> tuple[Question, list[str]]:
    if not labelled:
        return Question(item["question"], context), []
    fields = {"question": item["question"], "context": context}.items()
    empty = [p for name, value in fields if (p := text_problem(value, name, allow_empty=False))]
    if item.get("is_impossible", False):
        return Question(item["question"], context, ()), empty
    answers = tuple((a["text"], a["answer_start"]) for a in item["answers"])
    problems = [*empty, *_span_problems(context, answers)]
    return Question(item["question"], context, answers), [
        *problems,
        *["it has no answer but is not marked is_impossible"] * (not answers),
    ]


def _span_problems(context: str, answers: Sequence[tuple[Any, Any]]) -> list[str]:
    """List the answers that do not occur in the context at their position."""
    return [
        f"the answer {text!r} is not at character {start} of the context"
        for text, start in answers
        if not isinstance(start, int) or context[start : start + len(str(text))] != text or not text
    ]

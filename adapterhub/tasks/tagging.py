"""Tagging: named entities in a sentence, or one tag per word.

    example      a sentence as tokens, with one tag per token
    row          the word pieces; `labels`: the tag at the first piece of each token
    prediction   one tag per token, and the entities they form
    metrics      F1, precision and recall of entities; accuracy of tags; macro-F1 of plain tags

B-x begins an entity of kind x, I-x continues it, O is outside any entity; tags of other schemes
(`tasks/common/tag_schemes.py`) are learned as BIO, and predicted in the scheme of the data. The
first word piece of a token carries its tag; the other pieces are ignored in the loss and the
prediction, as in Devlin et al. 2019, section 5.3, https://arxiv.org/abs/1810.04805.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from adapterhub.config.options import option
from adapterhub.data.columns import WANTS, ColumnChoice, choose_columns
from adapterhub.data.examples import Grouped, check_labels, read_rows, refuse
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks.classification import WeighsClasses
from adapterhub.tasks.common.base import Encoded, Prediction, Task, register_task
from adapterhub.tasks.common.batches import IGNORED, Passed, Row, Setting, each_row, limit_of
from adapterhub.tasks.common.metrics import entity_metrics, tag_metrics
from adapterhub.tasks.common.preview import tags_line
from adapterhub.tasks.common.tag_schemes import (
    Scheme,
    fits,
    scheme_of,
    spans,
    tag_problems,
    written,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Read = tuple[int, int, int, float]  # a word, the pieces around it, its class, its probability
_WORDS = re.compile(r"[@#]?\w+(?:[-.'\u2019]\w+)*|[^\w\s]")


@dataclass(frozen=True)
class Sentence(Grouped):
    """A text, its tokens in order, and one tag per token or None: BIO, or a plain tag."""

    text: str
    tokens: tuple[str, ...]
    tags: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Entity:
    """An entity: its kind, its text, and its first and end character in the sentence.

    `score` is the mean probability of the tags of its tokens.
    """

    kind: str
    text: str
    start: int
    end: int
    score: float = 1.0


@dataclass(frozen=True)
class Tags(Prediction):
    """One tag per token, and the entities they form."""

    tags: tuple[str, ...]
    entities: tuple[Entity, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the tags, and the entities with their character positions in `text`."""
        return {"tags": list(self.tags), "entities": [vars(e) for e in self.entities]}

    def __str__(self) -> str:
        return "; ".join(f"{e.kind}: {e.text}" for e in self.entities) or "-"


@register_task
@dataclass(frozen=True)
class Tagging(WeighsClasses, Task):
    """Named entities in a sentence, or a tag for each word.

    Rows of `train.jsonl`:

        {"tokens": ["Ada", "Lovelace", "was", "born"], "tags": ["B-PER", "I-PER", "O", "O"]}
        {"tokens": ["in", "London"], "tags": ["O", "B-LOC"]}

    CoNLL columns and CoNLL-U can be read as well, and numeric tags with
    `--labels 0=O,1=B-PER,2=I-PER`. Rare tags get more weight with `class_weights: balanced`.

    Tags may also be IOB1, IO, BIOES or BILOU; `scheme` names an ambiguous scheme. Entities are
    learned as BIO, and predicted in the scheme of the data. Plain tags, such as parts of speech,
    are scored by accuracy and macro-F1, and each word is printed as `NOUN: cat`.

    `predict` prints the entities, or `-`; `start` and `end` count characters:

        PER: Ada
        {"tags": ["B-PER"], "entities": [{"kind": "PER", "text": "Ada", "start": 0, "end": 3, "score": 0.97}]}
    """  # noqa: E501

    scheme: Scheme = option("auto", "how tags form entities (auto: by the data)", omitted=True)

    name = "tagging"
    summary = "named entities in a sentence, or a tag for each word"
    measures = ("f1", "precision", "recall", "accuracy")
    columns = WANTS["tags"]
    has_labels = True
    printed_fields = ("tags", "entities")
    outcomes = "spans"
    cut_note = "the words that are cut are not learned, and get the tag O, or no plain tag"

    @property
    def main_metric(self) -> str:
        """The F1 of entities, or the accuracy of plain tags."""
        return "accuracy" if self.scheme == "plain" else "f1"

    def metric_names(self, examples: Sequence[Any]) -> tuple[str, ...]:
        """Return the metrics of entities or of plain tags."""
        return ("accuracy", "macro_f1") if self.scheme == "plain" else self.measures

    # Examples

    def fitted(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> tuple[Task, ColumnChoice]:
        """Infer the scheme of the tags, and report it unless it is BIO."""
        _, choice = super().fitted(source, options, split, labelled=labelled)
        if self.scheme != "auto" or not labelled:
            return self, choice
        task = replace(self, scheme=self._scheme_in(choice))
        notes = [_NOTES[task.scheme]] if task.scheme in _NOTES else []
        return task, replace(choice, notes=(*choice.notes, *notes))

    def _scheme_in(self, choice: ColumnChoice) -> Scheme:
        """Return the scheme of the tags of a table: the task's, if the tags fit it."""
        options, table = choice.options, choice.table
        assert table is not None
        names = {name: name for name in options.label_names.values()} | dict(options.label_names)
        (cells,) = table.take([options.label_column])
        tags = [
            [names.get(str(tag), str(tag)) for tag in cell]
            for cell in cells
            if isinstance(cell, list | tuple)
        ]
        known = self.scheme != "auto" and fits(tags, self.scheme)
        return self.scheme if known or self.scheme == "plain" else scheme_of(tags)

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Sentence]:
        """Read lists of tokens and tags: CoNLL columns, JSON lines, Parquet or a Hub dataset."""
        names = options.label_names
        choice = choose_columns(source, options, split, self.columns, labelled=labelled)
        text, label = choice.options.text_column, choice.options.label_column
        scheme = self._scheme_in(choice) if labelled else "bio"

        def build(tokens: object, tags: object = None) -> Sentence:
            refuse(_list_problem(tokens, text))
            if not labelled:
                return _sentence(tokens)
            named = _named_tags(tags, label, names)
            if len(tokens) != len(named):  # type: ignore[arg-type]
                refuse(f"{len(tokens)} tokens and {len(named)} tags")  # type: ignore[arg-type]
            refuse(*tag_problems(named, scheme))
            return _sentence(tokens, _converted(named, scheme, _learned(scheme)))

        columns = [text, label] if labelled else [text]
        return read_rows(source, choice.options, split, columns, build)

    def example(self, fields: Sequence[str], options: DataOptions) -> Sentence:
        """Split a text into words and punctuation marks."""
        return Sentence(fields[0], tuple(_WORDS.findall(fields[0])))

    def labels(self, train: Sequence[Sentence]) -> tuple[str, ...]:
        """Return the classes: O, then B-x and I-x for each kind of entity; or the plain tags."""
        if self.scheme == "plain":
            return tuple(sorted({tag for s in train for tag in s.tags or ()}))
        kinds = sorted({t[2:] for s in train for t in s.tags or () if t != "O"})
        return ("O", *(f"{position}-{kind}" for kind in kinds for position in "BI"))

    def check(self, labels: Sequence[str], examples: Sequence[Sentence]) -> None:
        """Reject data without entities, and evaluation tags missing from training."""
        if len(labels) < 2 and self.scheme != "plain":
            raise DataError(
                "the training data has no entities: every tag is O",
                hint="check the option label, the name of the column with the tags",
            )
        check_labels(labels, (t for s in examples for t in s.tags or ()))

    # Rows

    def rows_of(self, example: Sentence, setting: Setting, *, labelled: bool) -> list[Row]:
        """Split tokens into word pieces; `first` is the token that starts at a piece, else -1."""
        tokenizer = setting.tokenizer
        if not tokenizer.is_fast:
            raise ConfigError("tagging needs a fast tokenizer, which maps word pieces to words")
        limit = limit_of(setting)
        room = limit - tokenizer.num_special_tokens_to_add()
        encoded = tokenizer(
            list(example.tokens),
            is_split_into_words=True,
            truncation=True,
            max_length=limit,
            stride=max(min(limit // 4, room - 1), 0) if setting.windows else 0,
            return_overflowing_tokens=True,
        )
        names = [name for name in encoded if name != "overflow_to_sample_mapping"]
        rows: list[Row] = []
        for number in range(len(encoded["input_ids"]) if setting.windows else 1):
            row: Row = {name: encoded[name][number] for name in names}
            rows.append(row | {"first": _first_pieces(encoded.word_ids(number))})
        if labelled and (tags := example.tags) is not None:
            index = {label: i for i, label in enumerate(setting.labels)}
            for row in rows:
                row["labels"] = [IGNORED if w < 0 else index[tags[w]] for w in row["first"]]
        return rows

    def collate(self, rows: Sequence[Row], setting: Setting) -> Any:
        """Pad rows without `first`, which is not a model input."""
        inputs = [{k: v for k, v in row.items() if k != "first"} for row in rows]
        return super().collate(inputs, setting)

    def show_row(self, row: Row, setting: Setting) -> dict[str, str]:
        """Return the tokens with their tags."""
        return {
            "tokens": tags_line(row["input_ids"], row["labels"], setting.labels, setting.tokenizer)
        }

    # Predictions

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Return the most probable tag of each token, in the scheme of the data.

        Truncated tokens get O, or "" with plain tags. If several windows contain a token, the
        window with the most context counts.
        """
        left = data.setting.tokenizer.padding_side == "left"
        labels = data.setting.labels

        def read(passed: Passed) -> Iterator[list[_Read]]:
            best = passed.output.logits.float().softmax(-1).max(-1)
            rows = zip(passed.indices, best.indices.tolist(), best.values.tolist(), strict=True)
            for i, classes, values in rows:
                first = data.rows[i]["first"]
                offset = len(classes) - len(first) if left else 0
                yield [
                    (token, min(n, len(first) - n), classes[offset + n], values[offset + n])
                    for n, token in enumerate(first)
                    if token >= 0
                ]

        unread = "" if self.scheme == "plain" else "O"
        tags = [[unread] * len(sentence.tokens) for sentence in data.examples]
        scores = [[1.0] * len(sentence.tokens) for sentence in data.examples]
        around = [[-1] * len(sentence.tokens) for sentence in data.examples]
        probabilities = each_row(model, data, batch_size, read)
        for owner, tokens in zip(data.owners, probabilities, strict=True):
            for token, near, label, score in tokens:
                if near > around[owner][token]:
                    around[owner][token] = near
                    tags[owner][token], scores[owner][token] = labels[label], score
        written_tags = [self._as_in_data(own) for own in tags]
        return [
            Tags(tuple(own), tuple(entities(sentence, own, values, self._scheme)))
            for sentence, own, values in zip(data.examples, written_tags, scores, strict=True)
        ]

    @property
    def _scheme(self) -> Scheme:
        """The scheme of predictions; adapters without a recorded scheme use BIO."""
        return "bio" if self.scheme == "auto" else self.scheme

    def _as_in_data(self, tags: Sequence[str]) -> list[str]:
        return _converted(tags, _learned(self._scheme), self._scheme)

    # Metrics

    def metrics(
        self, examples: Sequence[Sentence], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Compute f1, precision and recall of entities, and the accuracy of tags.

        For plain tags, compute the accuracy and the mean F1 of the tags.
        """
        predicted = [list(p.tags) for p in predictions if isinstance(p, Tags)]
        tags = [self._as_in_data(e.tags or ()) for e in examples]
        if self.scheme == "plain":
            return tag_metrics(tags, predicted)
        bio = [[_converted(row, self._scheme, "bio") for row in rows] for rows in (tags, predicted)]
        return entity_metrics(*bio) | {"accuracy": tag_metrics(tags, predicted)["accuracy"]}

    def outcome(self, example: Sentence, prediction: Prediction) -> dict[str, Any]:
        """Return the entities of both as [kind, first character, end character]."""
        assert isinstance(prediction, Tags)
        true = entities(example, self._as_in_data(example.tags or ()), scheme=self._scheme)
        label, predicted = (
            [[e.kind, e.start, e.end] for e in es] for es in (true, prediction.entities)
        )
        return {"texts": [example.text], "label": label, "prediction": predicted}


def entities(
    sentence: Sentence,
    tags: Sequence[str],
    scores: Sequence[float] | None = None,
    scheme: Scheme = "bio",
) -> list[Entity]:
    """List the entities that tags form; for plain tags, each word.

    `scores` are the probabilities of the tags, 1 by default.
    """
    places: list[tuple[int, int]] = []
    end = 0
    for token in sentence.tokens:
        start = sentence.text.index(token, end)
        end = start + len(token)
        places.append((start, end))
    known = scores or [1.0] * len(tags)
    entities = []
    for kind, first, behind in spans(tags, scheme):
        start, end = places[first][0], places[behind - 1][1]
        score = sum(known[first:behind]) / (behind - first)
        entities.append(Entity(kind, sentence.text[start:end], start, end, score))
    return entities


_NOTES: Mapping[str, str] = {
    **{
        scheme: f"the tags are {scheme.upper()}: they are learned as BIO, and predicted as "
        f"{scheme.upper()}"
        for scheme in ("iob1", "io", "bioes", "bilou")
    },
    "plain": "the tags are of words, not of entities: accuracy and macro-F1 score them",
}


def _learned(scheme: Scheme) -> Scheme:
    """Return the scheme of the learned classes for tags of another scheme."""
    return "plain" if scheme == "plain" else "bio"


def _converted(tags: Sequence[str], scheme: Scheme, to: Scheme) -> list[str]:
    return written(spans(tags, scheme), len(tags), to)


def _sentence(tokens: Any, tags: Any = None) -> Sentence:
    return Sentence(" ".join(tokens), tuple(tokens), None if tags is None else tuple(tags))


def _first_pieces(words: Sequence[int | None]) -> list[int]:
    """Return the word that each word piece begins, else -1; `words` maps pieces to words."""
    before = [None, *words]
    return [
        -1 if w is None or w == b else w for w, b in zip(words, before[: len(words)], strict=True)
    ]


def _named_tags(tags: Any, column: str, names: Mapping[str, str]) -> list[str]:
    """Return the tags, renamed by the option `labels`, which also names numbers."""
    numbers = isinstance(tags, (list, tuple)) and any(type(tag) is int for tag in tags)
    if numbers and not names:
        raise ValueError(f"{column!r} has numbers; --labels 0=O,1=B-PER,2=I-PER,... names them")
    texts = [str(tag) for tag in tags] if numbers else tags
    refuse(_list_problem(texts, column))
    known = {name: name for name in names.values()} | dict(names)
    unnamed = sorted({tag for tag in texts if names and tag not in known})
    refuse(*(f"the tag {tag!r} has no name in --labels" for tag in unnamed))
    return [known.get(tag, tag) for tag in texts]


def _list_problem(value: object, column: str) -> str:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        kind = "list of other values" if isinstance(value, list) else type(value).__name__
        return f"{column!r} is a {kind}, not a list of strings"
    return "" if value else f"{column!r} is empty"

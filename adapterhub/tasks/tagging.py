"""Tagging: named entities in a sentence, by BIO tags.

    example      a sentence as tokens, with one tag per token
    row          the word pieces; `labels`: the tag at the first piece of each token
    prediction   one tag per token, and the entities they form
    metrics      F1, precision and recall of entities; accuracy of tags

B-x begins an entity of kind x, I-x continues it, O is outside any entity (Ramshaw & Marcus 1995,
https://arxiv.org/abs/cmp-lg/9505040, with B at every beginning, as in CoNLL since 2002). The first
word piece of a token carries its tag; the others are ignored in the loss and the prediction, as in
Devlin et al. 2019, section 5.3, https://arxiv.org/abs/1810.04805.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapterhub.data.columns import WANTS, choose_columns
from adapterhub.data.examples import Grouped, check_labels, read_rows, refuse
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks._base import Encoded, Prediction, Task
from adapterhub.tasks._class_weights import WeighsClasses
from adapterhub.tasks._forward import Passed, each_row
from adapterhub.tasks._metrics import entity_metrics
from adapterhub.tasks._registry import register_task
from adapterhub.tasks._rows import IGNORED, Row, Setting, limit_of
from adapterhub.tasks._show import tags_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Read = tuple[int, int, int, float]  # a word, the pieces around it, its class, its probability
_TAG = re.compile(r"O|[BI]-\S+")
_WORDS = re.compile(r"[@#]?\w+(?:[-.'\u2019]\w+)*|[^\w\s]")


@dataclass(frozen=True)
class Sentence(Grouped):
    """A text, its tokens in order, and one tag per token or None."""

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
    """Named entities in a sentence.

    Rows of `train.jsonl`:

        {"tokens": ["Ada", "Lovelace", "was", "born"], "tags": ["B-PER", "I-PER", "O", "O"]}
        {"tokens": ["in", "London"], "tags": ["O", "B-LOC"]}

    CoNLL columns are read as well, and numbers as tags with `--labels 0=O,1=B-PER,2=I-PER`. Tags
    that are rare get more weight with `class_weights: balanced`.

    `predict` prints the entities, or `-`; `start` and `end` count characters:

        PER: Ada
        {"tags": ["B-PER"], "entities": [{"kind": "PER", "text": "Ada", "start": 0, "end": 3, "score": 0.97}]}
    """  # noqa: E501

    name = "tagging"
    summary = "named entities in a sentence, by BIO tags"
    main_metric = "f1"
    measures = ("f1", "precision", "recall", "accuracy")
    columns = WANTS["tags"]
    has_labels = True
    printed_fields = ("tags", "entities")
    outcomes = "spans"
    cut_note = "the words that are cut are not learned, and get the tag O"

    # Examples

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Sentence]:
        """Read lists of tokens and tags: CoNLL columns, JSON lines, Parquet or a Hub dataset."""
        names = options.label_names
        choice = choose_columns(source, options, split, self.columns, labelled=labelled)
        text, label = choice.options.text_column, choice.options.label_column

        def build(tokens: object, tags: object = None) -> Sentence:
            refuse(_list_problem(tokens, text))
            if not labelled:
                return _sentence(tokens)
            named = _named_tags(tags, label, names)
            refuse(*_tag_problems(tokens, named))  # type: ignore[arg-type]
            return _sentence(tokens, named)

        columns = [text, label] if labelled else [text]
        return read_rows(source, choice.options, split, columns, build)

    def example(self, fields: Sequence[str], options: DataOptions) -> Sentence:
        """Split a text into words and punctuation marks."""
        return Sentence(fields[0], tuple(_WORDS.findall(fields[0])))

    def labels(self, train: Sequence[Sentence]) -> tuple[str, ...]:
        """Return the tags of the training data: O, then B-x and I-x for each kind."""
        kinds = sorted({t[2:] for s in train for t in s.tags or () if t != "O"})
        return ("O", *(f"{position}-{kind}" for kind in kinds for position in "BI"))

    def check(self, labels: Sequence[str], examples: Sequence[Sentence]) -> None:
        """Refuse data without entities, and evaluation tags that training lacks."""
        if len(labels) < 2:
            raise DataError(
                "the training data has no entities: every tag is O",
                hint="check the option label, the name of the column with the tags",
            )
        check_labels(labels, (t for s in examples for t in s.tags or ()))

    # Rows

    def rows_of(self, example: Sentence, setting: Setting, *, labelled: bool) -> list[Row]:
        """Split tokens into word pieces; `first` is the token that begins at a piece, else -1."""
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
        """Pad rows without `first`, which is no input of the model."""
        inputs = [{k: v for k, v in row.items() if k != "first"} for row in rows]
        return super().collate(inputs, setting)

    def show_row(self, row: Row, setting: Setting) -> dict[str, str]:
        """Return the tokens with their tags."""
        return {
            "tokens": tags_line(row["input_ids"], row["labels"], setting.labels, setting.tokenizer)
        }

    # Predictions

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Return the most probable tag of each token; O where the sentence was truncated.

        Of several windows with a token, it is that in which most tokens are around it.
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

        tags = [["O"] * len(sentence.tokens) for sentence in data.examples]
        scores = [[1.0] * len(sentence.tokens) for sentence in data.examples]
        around = [[-1] * len(sentence.tokens) for sentence in data.examples]
        found = each_row(model, data, batch_size, read)
        for owner, tokens in zip(data.owners, found, strict=True):
            for token, near, label, score in tokens:
                if near > around[owner][token]:
                    around[owner][token] = near
                    tags[owner][token], scores[owner][token] = labels[label], score
        return [
            Tags(tuple(own), tuple(entities(sentence, own, values)))
            for sentence, own, values in zip(data.examples, tags, scores, strict=True)
        ]

    # Metrics

    def metrics(
        self, examples: Sequence[Sentence], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Compute f1, precision and recall of entities, and the accuracy of tags."""
        predicted = [list(p.tags) for p in predictions if isinstance(p, Tags)]
        return entity_metrics([list(e.tags or ()) for e in examples], predicted)

    def outcome(self, example: Sentence, prediction: Prediction) -> dict[str, Any]:
        """Return the entities of both as [kind, first character, end character]."""
        assert isinstance(prediction, Tags)
        true = entities(example, example.tags or ())
        label, predicted = (
            [[e.kind, e.start, e.end] for e in es] for es in (true, prediction.entities)
        )
        return {"texts": [example.text], "label": label, "prediction": predicted}


def entities(
    sentence: Sentence, tags: Sequence[str], scores: Sequence[float] | None = None
) -> list[Entity]:
    """List the entities that tags form.

    An I-x that follows no entity of kind x begins one, as in seqeval's default mode.

    `scores` are the probabilities of the tags; by default they are 1.
    """
    spans: list[tuple[str, int, int, list[float]]] = []
    end, before = 0, "O"
    known = scores or [1.0] * len(tags)
    for token, tag, score in zip(sentence.tokens, tags, known, strict=True):
        start = sentence.text.index(token, end)
        end = start + len(token)
        if tag.startswith("I-") and before[2:] == tag[2:]:
            kind, first, _, values = spans.pop()
            spans.append((kind, first, end, [*values, score]))
        elif tag != "O":
            spans.append((tag[2:], start, end, [score]))
        before = tag
    return [Entity(k, sentence.text[a:b], a, b, sum(v) / len(v)) for k, a, b, v in spans]


def _sentence(tokens: Any, tags: Any = None) -> Sentence:
    return Sentence(" ".join(tokens), tuple(tokens), None if tags is None else tuple(tags))


def _first_pieces(words: Sequence[int | None]) -> list[int]:
    """Return for each word piece the word it begins, else -1; `words` maps pieces to words."""
    before = [None, *words]
    return [
        -1 if w is None or w == b else w for w, b in zip(words, before[: len(words)], strict=True)
    ]


def _named_tags(tags: Any, column: str, names: Mapping[str, str]) -> list[str]:
    """Return the tags, renamed by the option `labels`, with which numbers are tags too."""
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


def _tag_problems(tokens: Sequence[str], tags: Sequence[str]) -> list[str]:
    """List what is wrong with the tags of a sentence: their number, form or order."""
    if len(tokens) != len(tags):
        return [f"{len(tokens)} tokens and {len(tags)} tags"]
    problems = []
    for position, (before, tag) in enumerate(zip(("O", *tags), tags, strict=False), start=1):
        if not _TAG.fullmatch(tag):
            problems.append(f"token {position}: the tag {tag!r} is not O, B-kind or I-kind")
        elif tag.startswith("I-") and before[1:] != tag[1:]:
            problems.append(f"token {position}: {tag!r} cannot follow {before!r}")
    return problems

"""Tagging: entities in a sentence of tokens, by BIO tags.

B-x begins an entity of kind x, I-x continues it, O is outside of all (Ramshaw & Marcus 1995,
https://arxiv.org/abs/cmp-lg/9505040, with B at each beginning as CoNLL does since 2002). The first
word piece of a token carries its tag; the others have no part in the loss and none in the
prediction, as in Devlin et al. 2019, section 5.3, https://arxiv.org/abs/1810.04805.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from adapterhub.data.examples import check_labels, read_rows, refuse
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks._base import (
    IGNORED,
    Encoded,
    Prediction,
    Row,
    Setting,
    Task,
    forward,
    limit_of,
    one_row_each,
    register_task,
)
from adapterhub.tasks._metrics import entity_metrics

_TAG = re.compile(r"O|[BI]-\S+")
_WORDS = re.compile(r"[@#]?\w+(?:[-.'\u2019]\w+)*|[^\w\s]")


@dataclass(frozen=True)
class Sentence:
    """A text, its tokens in their order, and a tag each where they are known."""

    text: str
    tokens: tuple[str, ...]
    tags: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Entity:
    """A kind, the words, and where they begin and end in the sentence's text."""

    kind: str
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Tags(Prediction):
    """A tag each token, and the entities that they make."""

    tags: tuple[str, ...]
    entities: tuple[Entity, ...]

    def as_dict(self) -> dict[str, Any]:
        """The tags, and the entities with their characters' positions in `text`."""
        return {"tags": list(self.tags), "entities": [vars(e) for e in self.entities]}

    def __str__(self) -> str:
        return "; ".join(f"{e.kind}: {e.text}" for e in self.entities) or "-"


@register_task
@dataclass(frozen=True)
class Tagging(Task):
    """Entities in a sentence."""

    name = "tagging"
    summary = "entities in a sentence, by BIO tags"
    main_metric = "f1"

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Sentence]:
        """Lists of tokens and of tags: CoNLL columns, JSON lines, Parquet or a Hub dataset."""

        def build(tokens: object, tags: object = None) -> Sentence:
            refuse(_list_problem(tokens, options.text))
            if not labelled:
                return _sentence(tokens)
            refuse(_list_problem(tags, options.label))
            refuse(*_tag_problems(tokens, tags))  # type: ignore[arg-type]
            return _sentence(tokens, tags)

        columns = [options.text, options.label] if labelled else [options.text]
        return read_rows(source, options, split, columns, build)

    def example(self, fields: Sequence[str], options: DataOptions) -> Sentence:
        """Its tokens are the words, and each other mark by itself."""
        return Sentence(fields[0], tuple(_WORDS.findall(fields[0])))

    def labels(self, train: Sequence[Sentence]) -> tuple[str, ...]:
        """The tags of the training data: O, then B-x and I-x of each kind in turn."""
        kinds = sorted({t[2:] for s in train for t in s.tags or () if t != "O"})
        return ("O", *(f"{position}-{kind}" for kind in kinds for position in "BI"))

    def check(self, labels: Sequence[str], examples: Sequence[Sentence]) -> None:
        """One kind of entity or more, and no others in evaluation."""
        if len(labels) < 2:
            raise DataError(
                "the training data has no entities: each tag is O",
                hint="check the option label, the name of the column with the tags",
            )
        check_labels(labels, (t for s in examples for t in s.tags or ()))

    def encode(self, examples: Sequence[Sentence], setting: Setting, *, labelled: bool) -> Encoded:
        """Tokens in word pieces; `first` has the index of the token that begins there, else -1."""
        tokenizer = setting.tokenizer
        if not tokenizer.is_fast:
            raise ConfigError("tagging needs a fast tokenizer, which knows the word of each piece")
        index = {label: i for i, label in enumerate(setting.labels)}
        rows: list[Row] = []
        for sentence in examples:
            encoded = tokenizer(
                list(sentence.tokens),
                is_split_into_words=True,
                truncation=True,
                max_length=limit_of(setting),
            )
            row: Row = dict(encoded)
            row["first"] = _first_pieces(encoded.word_ids())
            if labelled and sentence.tags is not None:
                tags = sentence.tags
                row["labels"] = [IGNORED if w < 0 else index[tags[w]] for w in row["first"]]
            rows.append(row)
        return one_row_each(self, examples, setting, rows)

    def collate(self, rows: Sequence[Row], setting: Setting) -> Any:
        """Without `first`, which the model does not take."""
        known = [{k: v for k, v in row.items() if k != "first"} for row in rows]
        return super().collate(known, setting)

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """The most probable tag of each token; O where the sentence was cut."""
        labels, side = data.setting.labels, data.setting.tokenizer.padding_side
        found: dict[int, Prediction] = {}
        for indices, batch, output in forward(model, data, batch_size):
            best = output.logits.argmax(-1).tolist()
            width = batch["input_ids"].shape[1]
            for i, classes in zip(indices, best, strict=True):
                first = data.rows[i]["first"]
                skipped = width - len(first) if side == "left" else 0
                tokens = data.examples[i].tokens
                tags = ["O"] * len(tokens)
                for position, word in enumerate(first):
                    if word >= 0:
                        tags[word] = labels[classes[skipped + position]]
                found[i] = Tags(tuple(tags), tuple(entities(data.examples[i], tags)))
        return [found[i] for i in range(len(found))]

    def metrics(
        self, examples: Sequence[Sentence], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """f1, precision, recall of whole entities, and the accuracy of tags."""
        found = [list(p.tags) for p in predictions if isinstance(p, Tags)]
        return entity_metrics([list(e.tags or ()) for e in examples], found)


def entities(sentence: Sentence, tags: Sequence[str]) -> list[Entity]:
    """The entities that tags make. An I-x that continues nothing begins an entity, as in
    seqeval's default mode."""
    spans: list[tuple[str, int, int]] = []
    end, before = 0, "O"
    for token, tag in zip(sentence.tokens, tags, strict=True):
        start = sentence.text.index(token, end)
        end = start + len(token)
        if tag.startswith("I-") and before[2:] == tag[2:]:
            kind, first, _ = spans.pop()
            spans.append((kind, first, end))
        elif tag != "O":
            spans.append((tag[2:], start, end))
        before = tag
    return [Entity(kind, sentence.text[a:b], a, b) for kind, a, b in spans]


def _sentence(tokens: Any, tags: Any = None) -> Sentence:
    return Sentence(" ".join(tokens), tuple(tokens), None if tags is None else tuple(tags))


def _first_pieces(words: Sequence[int | None]) -> list[int]:
    before = [None, *words]
    return [
        -1 if w is None or w == b else w for w, b in zip(words, before[: len(words)], strict=True)
    ]


def _list_problem(value: object, column: str) -> str:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        kind = "list with other things in it" if isinstance(value, list) else type(value).__name__
        return f"{column!r} is a {kind}, not a list of strings"
    return "" if value else f"{column!r} is empty"


def _tag_problems(tokens: Sequence[str], tags: Sequence[str]) -> list[str]:
    """What is wrong with the tags of a sentence: their number, their form, their order."""
    if len(tokens) != len(tags):
        return [f"{len(tokens)} tokens and {len(tags)} tags"]
    problems = []
    for position, (before, tag) in enumerate(zip(("O", *tags), tags, strict=False), start=1):
        if not _TAG.fullmatch(tag):
            problems.append(f"token {position}: the tag {tag!r} is not O, B-kind or I-kind")
        elif tag.startswith("I-") and before[1:] != tag[1:]:
            problems.append(f"token {position}: {tag!r} continues nothing, it follows {before!r}")
    return problems

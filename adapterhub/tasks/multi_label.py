"""Multi-label classification: any number of labels per text or pair of texts.

    example      a text or a pair, with any number of labels
    row          the tokens; `labels`: 1.0 for each label of the text, else 0.0
    prediction   the labels whose probability is at least `threshold`, and all probabilities
    metrics      micro F1, macro F1; exact match, the share of texts with exactly the right labels

Each label is decided independently: its probability is the sigmoid of its logit, and the loss is
the binary cross-entropy, averaged over texts and labels (Nam et al. 2014, section 3,
https://arxiv.org/abs/1312.5419). In transformers this is
`problem_type="multi_label_classification"`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from adapterhub.config.options import option
from adapterhub.data.columns import WANTS, choose_columns
from adapterhub.data.examples import Grouped, read_rows, refuse, sorted_labels, text_problem
from adapterhub.data.options import SEPARATORS, DataOptions, name_labels
from adapterhub.data.tables import first_few
from adapterhub.errors import ConfigError, DataError, counted
from adapterhub.tasks.classification import OfTexts, score_cells, score_columns
from adapterhub.tasks.common.base import POOLING_HELP, Encoded, Pooling, Prediction, register_task
from adapterhub.tasks.common.batches import Passed, Row, Setting
from adapterhub.tasks.common.metrics import multi_label_metrics
from adapterhub.tasks.common.preview import tokens_line

_YES, _NO = {"1", "1.0", "true", "yes"}, {"0", "0.0", "false", "no", ""}


@dataclass(frozen=True)
class LabelledText(Grouped):
    """A text or a pair of texts with its labels, or None."""

    text: str
    pair: str | None = None
    labels: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Labels(Prediction):
    """The labels of a text, most probable first, and the probability of every label."""

    labels: tuple[str, ...]
    scores: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Return the labels and the probability of every label."""
        return {"labels": list(self.labels), "scores": self.scores}

    def __str__(self) -> str:
        return ", ".join(f"{label} {self.scores[label]:.3f}" for label in self.labels) or "-"

    @property
    def probabilities(self) -> tuple[float, ...]:
        """The probabilities of the labels."""
        return tuple(self.scores[label] for label in self.labels)

    def cells(self, every: bool = False) -> tuple[str, ...]:
        """Return the labels and their probabilities."""
        shown = ", ".join(f"{value:.3f}" for value in self.probabilities)
        return ", ".join(self.labels) or "-", shown or "-", *score_cells(self.scores, every)

    def columns(self, every: bool = False) -> dict[str, Any]:
        """Return the labels and their probabilities."""
        columns = {"labels": [*self.labels], "probabilities": [*self.probabilities]}
        return columns | score_columns(self.scores, every)


@register_task
@dataclass(frozen=True)
class MultiLabel(OfTexts):
    """Any number of labels per text or pair of texts.

    Rows of `train.csv`:

        text,label
        "you fool, get lost",insult;threat
        "thanks, that helped",

    The label column has a JSON list or a cell such as `insult;threat`. The separator is the first
    of `;`, `|` and `,` that occurs in the column, or the option `separator`. An empty cell means no
    labels. Columns with 1 or 0 are listed: `--label toxic,insult,threat`. peft's format does not
    record the loss; the README of an exported adapter names it.

    `predict` prints the labels with their probabilities, most probable first, or `-`:

        insult 0.912, threat 0.604
        {"labels": ["insult", "threat"], "scores": {"insult": 0.912, "threat": 0.604}}
    """

    threshold: float = option(0.5, "lowest probability at which a label is predicted")
    separator: str | None = option(
        None, "what separates the labels of a cell (null: the first of ; | , that occurs)"
    )
    pooling: Pooling | None = option(None, POOLING_HELP)

    name = "multi-label"
    summary = "any number of labels per text or pair of texts"
    main_metric = "micro_f1"
    measures = ("micro_f1", "macro_f1", "exact_match")
    has_labels = has_scores = True
    printed_fields = ("labels", "scores")
    columns = WANTS["labels"]
    outcomes = "sets"

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise ConfigError(f"threshold is {self.threshold}", expected="a number between 0 and 1")

    # Examples

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Any]:
        """Read texts with their labels.

        Labels are a JSON list, a cell with separated labels, or columns with 1 or 0 named by the
        labels; the option `label` then lists these columns: toxic,insult,threat.
        """
        choice = choose_columns(source, options, split, self.columns, labelled=labelled)
        options = choice.options
        texts = [name for name in (options.text, options.pair) if name is not None]
        columns = [n.strip() for n in options.label_column.split(",")] if labelled else []

        def build(*values: Any) -> LabelledText:
            named = zip(values, texts, strict=False)
            refuse(*(text_problem(v, name, allow_empty=not labelled) for v, name in named))
            text, pair = (*values[: len(texts)], None)[:2]
            if not labelled:
                return LabelledText(text, pair)
            cells = dict(zip(columns, values[len(texts) :], strict=True))
            return LabelledText(text, pair, _labels_of_row(cells))

        examples = read_rows(source, options, split, [*texts, *columns], build)
        if not labelled:
            return examples
        examples = self._split(examples)
        rows = [e.labels or () for e in examples]
        named = iter(name_labels((x for row in rows for x in row), options, source))
        return [replace(e, labels=tuple(next(named) for _ in e.labels or ())) for e in examples]

    def outcome(self, example: Any, prediction: Prediction) -> dict[str, Any]:
        """Return the text, its labels, the predicted labels and the probability of each label."""
        assert isinstance(prediction, Labels)
        return {
            "texts": self.shown(example),
            "label": list(example.labels or ()),
            "prediction": list(prediction.labels),
            "scores": prediction.scores,
        }

    def _split(self, examples: list[LabelledText]) -> list[LabelledText]:
        """Split label cells, which `read` leaves whole."""
        cells = [label for e in examples for label in e.labels or () if isinstance(label, _Cell)]
        separator = self.separator or next(
            (mark for mark in SEPARATORS if any(mark in cell for cell in cells)), None
        )
        return [replace(e, labels=tuple(_parts(e.labels or (), separator))) for e in examples]

    def labels(self, train: Sequence[LabelledText]) -> tuple[str, ...]:
        """Return the labels of the training data, sorted."""
        return tuple(sorted_labels(label for e in train for label in e.labels or ()))

    def check(self, labels: Sequence[str], examples: Sequence[LabelledText]) -> None:
        """Reject fewer than two labels, and evaluation labels missing from training."""
        if len(labels) < 2:
            raise DataError(
                f"the training data has {counted(len(labels), 'label')}",
                offenders=[repr(label) for label in labels],
                expected="two or more labels",
                hint="--task classification if each text has one label of two, such as yes and no",
            )
        unseen = Counter(x for e in examples for x in e.labels or () if x not in labels)
        if unseen:
            raise DataError(
                "the evaluation data has labels that the training data lacks",
                offenders=[
                    f"{label!r}: {counted(n, 'time')}" for label, n in sorted(unseen.items())
                ],
                expected=f"some of {', '.join(first_few([repr(label) for label in labels]))}",
            )

    # Rows

    def target(self, example: Any, labels: Sequence[str]) -> list[float]:
        """Return 1.0 for each label of the example, else 0.0."""
        own = set(example.labels or ())
        return [float(label in own) for label in labels]

    def show_row(self, row: Row, setting: Setting) -> dict[str, str]:
        """Return the tokens and the labels."""
        pairs = zip(setting.labels, row["labels"], strict=True)
        own = [label for label, value in pairs if value]
        tokens = tokens_line(row["input_ids"], setting.tokenizer)
        return {"tokens": tokens, "labels": ", ".join(own) or "none"}

    def label_counts(self, encoded: Encoded) -> dict[str, int]:
        """Count the texts of each label."""
        rows = [row.get("labels", ()) for row in encoded.rows]
        counts = [sum(map(int, column)) for column in zip(*rows, strict=True)]
        return dict(zip(encoded.setting.labels, counts, strict=True))

    # Predictions

    def read_output(self, data: Encoded, passed: Passed) -> Iterator[Prediction]:
        """Return the labels at or above the threshold, with the sigmoid of every label."""
        for row in passed.output.logits.float().sigmoid().tolist():
            scores = dict(zip(data.setting.labels, row, strict=True))
            above = [label for label in scores if scores[label] >= self.threshold]
            above.sort(key=scores.__getitem__, reverse=True)
            yield Labels(tuple(above), scores)

    # Metrics

    def metrics(
        self, examples: Sequence[LabelledText], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Compute micro_f1, macro_f1 and exact_match."""
        predicted = [p for p in predictions if isinstance(p, Labels)]
        labels = list(predicted[0].scores) if predicted else []
        return multi_label_metrics(
            labels, [e.labels or () for e in examples], [p.labels for p in predicted]
        )


class _Cell(str):
    """The text of one label cell, before separation."""


def _labels_of_row(cells: dict[str, Any]) -> tuple[str, ...]:
    """Return the unseparated labels of one cell, or the columns with a 1.

    Raises:
        ValueError: a cell is missing or has another form.
    """
    if len(cells) > 1:
        refuse(*(_flag_problem(column, value) for column, value in cells.items()))
        return tuple(column for column, value in cells.items() if _flag(value) in _YES)
    ((column, value),) = cells.items()
    if isinstance(value, (list, tuple)):
        if not all(isinstance(item, (str, int)) for item in value):
            raise ValueError(f"{column!r} is a list of other values than labels")
        return _unique(str(item).strip() for item in value)
    if not isinstance(value, (str, int)):
        raise ValueError(f"{column!r} is {value!r}, not a list or a text with labels")
    return (_Cell(value),)


def _flag(value: object) -> str:
    return str(value).strip().lower()


def _flag_problem(column: str, value: object) -> str:
    return "" if _flag(value) in _YES | _NO else f"{column!r} is {str(value)[:40]!r}, not 1 or 0"


def _parts(labels: Iterable[str], separator: str | None) -> tuple[str, ...]:
    """Return labels, with the labels of cells separated."""
    parts: list[str] = []
    for label in labels:
        cut = isinstance(label, _Cell) and separator is not None
        parts += label.split(separator) if cut else [str(label)]
    return _unique(part.strip() for part in parts)


def _unique(labels: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(label for label in labels if label))

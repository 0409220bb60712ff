"""What a report shows of the predictions: one function for each kind of outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from markupsafe import Markup

from adapterhub.files.shown_table import ShownTable
from adapterhub.pages.figures import histogram_chart, reliability_chart, scatter_chart
from adapterhub.pages.predictions import PICTURE, Outcome, PredictionFile
from adapterhub.pages.statistics import (
    ClassScore,
    calibration,
    class_scores,
    confusions,
    is_right,
    span_scores,
)

WORST = 20  # examples that are shown
MARKS = "Green entities are in both; dotted orange ones in one only"
_MOST_CLASSES = 12  # of a confusion matrix; with more, the most confused pairs are listed
_MOST_SCORES = 40  # rows of the table of classes


MarkedPart: TypeAlias = tuple[str, str, bool]


@dataclass(frozen=True)
class Chart:
    """A chart with its caption."""

    title: str
    svg: Markup
    note: str = ""


@dataclass(frozen=True)
class ChartGroup:
    """Charts of one kind, with a title and a sentence; `wide` ones have names in them."""

    title: str
    note: str
    charts: Sequence[Chart]
    wide: bool = False


@dataclass(frozen=True)
class Matrix:
    """A confusion matrix: counts of (label, prediction), with the share of the label's examples."""

    labels: tuple[str, ...]
    rows: list[tuple[str, list[tuple[int, float]]]]


@dataclass(frozen=True)
class Shown:
    """One example: its texts, and (name, text, kind of mark) for label, prediction and so on.

    `marked` lists texts with entities as (name, [(text, entity or "", whether both have it)]);
    `picture` is the address of one, data:image/png.
    """

    texts: list[str]
    facts: list[tuple[str, str, str]] = field(default_factory=list)
    marked: list[tuple[str, list[MarkedPart]]] = field(default_factory=list)
    picture: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page: a title, a sentence, and what it shows."""

    id: str
    title: str
    note: str = ""
    charts: list[Chart] = field(default_factory=list)
    table: ShownTable | None = None
    matrix: Matrix | None = None
    examples: list[Shown] = field(default_factory=list)


def prediction_sections(predictions: PredictionFile) -> list[Section]:
    """Return the sections that a kind of predictions has."""
    return _SECTIONS[predictions.kind](predictions)


def _classes(predictions: PredictionFile) -> list[Section]:
    rows, labels = predictions.rows, predictions.labels
    scores = class_scores(rows, labels)
    return [_confusion(rows, scores), _score_section(scores, "class"), *_choices(predictions)]


def _choices(predictions: PredictionFile) -> list[Section]:
    rows = predictions.rows
    bins, error = calibration(rows)
    note = (
        f"Expected calibration error {error:.3f}. On the dashed line, a probability of 0.8 is "
        "right 8 times of 10; below it, the model is too sure. Bars: the share of the examples."
    )
    chart = Chart("Accuracy by probability", Markup(reliability_chart(bins)))
    wrong = sorted((r for r in rows if not is_right(r)), key=lambda r: -r["score"])
    shown = [
        Shown(
            row["texts"],
            [
                ("true", str(row["label"]), "right"),
                ("predicted", row["prediction"], "wrong"),
                ("probability", f"{row['score']:.3f}", ""),
            ],
        )
        for row in wrong[:WORST]
    ]
    return [
        Section("calibration", "Calibration", note, [chart]),
        _worst(shown, len(wrong), len(rows), "are wrong, the most confident first"),
    ]


def _confusion(rows: Sequence[Outcome], scores: Sequence[ClassScore]) -> Section:
    counts = confusions(rows)
    if len(scores) <= _MOST_CLASSES:
        names = tuple(score.name for score in scores)
        lines = [
            (s.name, [(counts[s.name, n], counts[s.name, n] / max(s.support, 1)) for n in names])
            for s in scores
        ]
        note = "Rows: true classes. Columns: predictions. The shade is the share of the row."
        return Section("confusion", "Confusion", note, matrix=Matrix(names, lines))
    support = {score.name: score.support for score in scores}
    pairs = [(pair, n) for pair, n in counts.most_common() if pair[0] != pair[1]][:WORST]
    table = ShownTable(
        ("true → predicted", "examples", "of the class"),
        [(f"{a} → {b}", f"{n:,}", f"{n / support[a]:.1%}") for (a, b), n in pairs],
    )
    return Section("confusion", "Most confused classes", table=table)


def _score_section(scores: Sequence[ClassScore], what: str) -> Section:
    chosen = scores
    note = ""
    if len(scores) > _MOST_SCORES:
        chosen = sorted(scores, key=lambda s: s.f1)[:_MOST_SCORES]
        note = f"{_MOST_SCORES} of {len(scores):,}, the lowest F1 first."
    rows = [
        (s.name, f"{s.precision:.3f}", f"{s.recall:.3f}", f"{s.f1:.3f}", f"{s.support:,}")
        for s in chosen
    ]
    table = ShownTable((what, "precision", "recall", "F1", "examples"), rows)
    return Section("scores", f"Scores by {what}", note, table=table)


def _numbers(predictions: PredictionFile) -> list[Section]:
    rows = predictions.rows
    true, given = ([float(row[n]) for row in rows] for n in ("label", "prediction"))
    residuals = [p - t for t, p in zip(true, given, strict=True)]
    mean = sum(residuals) / len(residuals)
    charts = [
        Chart("Predicted by true number", Markup(scatter_chart(true, given))),
        Chart(
            "Residuals: predicted minus true",
            Markup(histogram_chart(residuals, "residual", centre=0.0)),
            f"mean {mean:+.3f}",
        ),
    ]
    order = sorted(range(len(rows)), key=lambda i: -abs(residuals[i]))
    shown = [
        Shown(
            rows[i]["texts"],
            [
                ("true", f"{true[i]:.3f}", "right"),
                ("predicted", f"{given[i]:.3f}", "wrong"),
                ("difference", f"{residuals[i]:+.3f}", ""),
            ],
        )
        for i in order[:WORST]
    ]
    return [
        Section("residuals", "Predictions", charts=charts),
        Section("worst", "Farthest from the truth", examples=shown),
    ]


def _spans(predictions: PredictionFile) -> list[Section]:
    rows = predictions.rows

    def wrong(row: Outcome) -> int:
        true, given = ({tuple(span) for span in row[n]} for n in ("label", "prediction"))
        return len(true ^ given)

    order = sorted((row for row in rows if wrong(row)), key=lambda row: -wrong(row))
    shown = [
        Shown(
            [],
            marked=[
                (name, marked_text((row["texts"] or [""])[0], row[own], row[other]))
                for name, own, other in (
                    ("true", "label", "prediction"),
                    ("predicted", "prediction", "label"),
                )
            ],
        )
        for row in order[:WORST]
    ]
    return [
        _score_section(span_scores(rows), "entity"),
        _worst(shown, len(order), len(rows), f"have wrong entities, the most wrong first. {MARKS}"),
    ]


def _sets(predictions: PredictionFile) -> list[Section]:
    rows = predictions.rows
    as_spans = [
        {name: [[label, 0, 0] for label in row[name]] for name in ("label", "prediction")}
        for row in rows
    ]
    wrong = [row for row in rows if set(row["label"]) != set(row["prediction"])]
    wrong.sort(key=lambda row: -len(set(row["label"]) ^ set(row["prediction"])))
    shown = [
        Shown(
            row["texts"],
            [
                ("true", ", ".join(row["label"]) or "(none)", "right"),
                ("predicted", ", ".join(row["prediction"]) or "(none)", "wrong"),
                ("probability", _probabilities(row), ""),
            ],
        )
        for row in wrong[:WORST]
    ]
    return [
        _score_section(span_scores(as_spans), "label"),
        _worst(shown, len(wrong), len(rows), "have wrong labels, the most wrong first"),
    ]


def _probabilities(row: Outcome) -> str:
    """Write the probabilities of the labels that are true or predicted."""
    named = dict.fromkeys([*row["label"], *row["prediction"]])
    return ", ".join(f"{label} {row['scores'].get(label, 0.0):.3f}" for label in named)


def marked_text(
    text: str, spans: Sequence[Sequence[Any]], others: Sequence[Sequence[Any]]
) -> list[MarkedPart]:
    """Split a text at its entities; say of each whether it is among the others too.

    Entities are [kind, first character, end character].
    """
    parts: list[MarkedPart] = []
    done = 0
    for kind, start, end in sorted(spans, key=lambda span: (span[1], span[2])):
        if start >= done:
            both = [kind, start, end] in others
            parts += [(text[done:start], "", False), (text[start:end], kind, both)]
            done = end
    return [part for part in [*parts, (text[done:], "", False)] if part[0]]


def _texts(predictions: PredictionFile) -> list[Section]:
    rows = predictions.rows
    scores = [float(row["score"]) for row in rows]
    chart = Chart("Score of each text", Markup(histogram_chart(scores, "score, 1 is best")))
    order = sorted((row for row in rows if row["score"] < 1), key=lambda row: row["score"])
    shown = [
        Shown(
            row["texts"],
            [
                ("reference", row["label"] or "(no answer)", "right"),
                ("predicted", row["prediction"] or "(empty)", "wrong"),
                ("score", f"{row['score']:.3f}", ""),
            ],
        )
        for row in order[:WORST]
    ]
    return [
        Section("quality", "Quality of the texts", charts=[chart]),
        _worst(shown, len(order), len(rows), "differ from their reference, the most first"),
    ]


def _losses(predictions: PredictionFile) -> list[Section]:
    rows = [row for row in predictions.rows if row["tokens"]]
    if not rows:
        return []
    losses = [float(row["loss"]) for row in rows]
    chart = Chart("Loss of each example", Markup(histogram_chart(losses, "loss per token")))
    order = sorted(rows, key=lambda row: -row["loss"])
    shown = [
        Shown(
            row["texts"], [("loss", f"{row['loss']:.3f}", ""), ("tokens", f"{row['tokens']:,}", "")]
        )
        for row in order[:WORST]
    ]
    return [
        Section("quality", "Loss of the examples", charts=[chart]),
        Section("worst", "Highest loss", examples=shown),
    ]


def _pictures(predictions: PredictionFile) -> list[Section]:
    rows = predictions.rows
    losses = [float(row["loss"]) for row in rows]
    chart = Chart("Loss of each picture", Markup(histogram_chart(losses, "loss")))
    made = [row for row in rows if row[PICTURE]]
    shown = [Shown(row["texts"], picture=row[PICTURE]) for row in made[:WORST]]
    note = f"What the adapter makes of prompts of the evaluation, at step {predictions.step:,}."
    gallery = [Section("pictures", "Pictures", note, examples=shown)] if shown else []
    return [Section("quality", "Loss of the pictures", charts=[chart]), *gallery]


def _worst(shown: list[Shown], wrong: int, total: int, what: str) -> Section:
    if not wrong:
        return Section("worst", "Worst mistakes", f"There are none in {total:,} examples.")
    note = f"{wrong:,} of {total:,} examples {what}."
    return Section("worst", "Worst mistakes", note, examples=shown)


_SECTIONS: dict[str, Callable[[PredictionFile], list[Section]]] = {
    "classes": _classes,
    "sets": _sets,
    "choices": _choices,
    "numbers": _numbers,
    "spans": _spans,
    "texts": _texts,
    "losses": _losses,
    "pictures": _pictures,
}

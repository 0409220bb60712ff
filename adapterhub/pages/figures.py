"""The figures of a page: small SVG charts, and the sections that show the predictions of a run.

matplotlib draws the charts for light and dark mode, without dates, with the same bytes for the same
data. It draws them in a few sentinel colours, which are replaced by CSS variables of the page.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from markupsafe import Markup

from adapterhub.errors import one_line
from adapterhub.files.shown_table import ShownTable
from adapterhub.pages.row_scores import (
    PICTURE,
    CalibrationBin,
    ClassScore,
    Outcome,
    PredictionFile,
    calibration,
    class_scores,
    confusions,
    is_right,
    span_scores,
)

# Sentinel colour -> CSS variable of page.html.
COLOURS = {"#010203": "ink", "#040506": "muted", "#070809": "grid", "#0a0b0c": "first",
           "#0d0e0f": "second", "#101112": "third", "#131415": "fourth",
           "#161718": "fifth"}  # fmt: skip
INK, MUTED, GRID, FIRST, SECOND, THIRD, _FOURTH, _FIFTH = COLOURS
LINES = (FIRST, SECOND, THIRD, MUTED)
SERIES = (FIRST, SECOND, THIRD, _FOURTH, _FIFTH, INK)
"""Colours for series of one kind: colour-blind safe, each with its own marker."""
MARKERS = ("o", "s", "^", "D", "v", "P")
_SIZE = (4.2, 2.4)  # inches: 302 points wide, so that text is readable on a phone
# Fixed, since a layout fitted to the labels doubles the drawing time.
_MARGINS = {"left": 0.155, "right": 0.965, "bottom": 0.2, "top": 0.965}
_OVERLAY_SIZE = (4.6, 2.8)
_FEW = 30  # number of points up to which markers are drawn
_NAME_SIZE = 8.5  # points, for a name at the end of its line
_LINE_HEIGHT, _CHARACTER_WIDTH = 1.15 * _NAME_SIZE, 0.56 * _NAME_SIZE  # about
_MOST_AT_AN_END = 20  # characters in such a name
_MOST_POINTS = 300
_MOST_IN_A_NAME = 30  # characters, in a legend
_LARGEST = 1e30  # largest value: matplotlib computes with squared lengths
_LOGARITHMIC = 100  # ratio of values above which an axis is logarithmic
_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "adapterhub", "text.parse_math": False,
    "font.size": 9.5, "font.family": "sans-serif", "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED, "text.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID,
    "grid.linewidth": 0.6, "xtick.major.size": 0, "ytick.major.size": 0, "lines.linewidth": 1.6,
    "axes.axisbelow": True, "axes.formatter.useoffset": False, "legend.frameon": False,
    "legend.fontsize": 9,
}  # fmt: skip

Points = Sequence[tuple[float, float | None]]
"""x and y; None for a missing value."""


def line_chart(
    lines: dict[str, Points],
    x: str,
    *,
    best: float | None = None,
    span: float = 0.0,
    zero: bool = False,
    log: bool = False,
) -> str:
    """Draw named lines over the steps of a run, with the axis label `x`.

    `best` is the x of the best evaluation, which is marked. The vertical axis covers at least
    `span`, so that noise stays small. With `zero` it begins at 0. With `log` it is logarithmic if
    the values differ widely.
    """

    def draw(axes: Any) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

        for (name, points), colour in zip(lines.items(), LINES, strict=False):
            xs, ys = thinned(points)
            few = "o" if len(xs) < _FEW else ""
            label = one_line(name, _MOST_IN_A_NAME)
            axes.plot(xs, ys, color=colour, label=label, marker=few, markersize=3)
            if best is not None and best in xs:
                y = ys[xs.index(best)]
                axes.plot([best], [y], "o", color=SECOND, markersize=7, fillstyle="none")
        axes.set_xlabel(one_line(x))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        values = [v for points in lines.values() for v in thinned(points)[1]]
        if log and values and max(values) > _LOGARITHMIC * min(values) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            axes.yaxis.set_major_locator(MaxNLocator(5))
            _widen(axes, span)
        if zero:
            axes.set_ylim(0, 1.1 * max(values, default=1.0) or 1.0)
        if len(lines) > 1:
            axes.legend()

    return svg_chart(draw)


def reliability_chart(bins: Sequence[CalibrationBin]) -> str:
    """Draw the accuracy of predictions against their probability."""

    def draw(axes: Any) -> None:
        total = sum(b.count for b in bins)
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (3, 3)))
        axes.bar([b.low + 0.05 for b in bins], [b.count / total for b in bins], 0.09, color=GRID)
        xs, ys = [b.confidence for b in bins], [b.accuracy for b in bins]
        axes.plot(xs, ys, color=FIRST, marker="o", markersize=4)
        axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="probability", ylabel="accuracy")

    return svg_chart(draw)


def scatter_chart(true: Sequence[float], predicted: Sequence[float]) -> str:
    """Draw predicted against true numbers, with the diagonal."""

    def draw(axes: Any) -> None:
        both = np.array([true, predicted]).clip(-_LARGEST, _LARGEST)
        ends = [both.min(), both.max()]
        axes.plot(ends, ends, color=MUTED, linewidth=1, linestyle=(0, (3, 3)))
        axes.plot(
            *both[:, _spread(len(true), 500)],
            "o",
            color=FIRST,
            alpha=0.45,
            markersize=3,
            markeredgewidth=0,
        )
        axes.set(xlabel="true", ylabel="predicted")

    return svg_chart(draw)


def histogram_chart(values: Sequence[float], x: str, *, centre: float | None = None) -> str:
    """Draw the distribution of values, with a vertical line at `centre`."""

    def draw(axes: Any) -> None:
        kept = np.array(values).clip(-_LARGEST, _LARGEST)
        low, high = kept.min(), kept.max()
        if high - low < 1e-6 * max(abs(low), abs(high), 1e-6):  # no bins between nearly equal ends
            margin = abs(low) / 10 or 0.5
            low, high = low - margin, high + margin
        axes.hist(kept, bins=30, range=(low, high), color=FIRST)
        if centre is not None:
            axes.axvline(centre, color=SECOND, linewidth=1.2)
        axes.set(xlabel=x, ylabel="examples")

    return svg_chart(draw)


def overlay_chart(lines: dict[str, Points], x: str) -> str:
    """Draw overlaid lines, each in its own colour and with its name at the end."""

    def draw(axes: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        ends, colours = {}, []
        for number, (name, points) in enumerate(lines.items()):
            xs, ys = thinned(points)
            if not xs:
                continue
            colour = SERIES[number % len(SERIES)]
            marker = MARKERS[number % len(MARKERS)] if len(xs) < _FEW else ""
            dashes = "-" if number < len(SERIES) else "--"
            axes.plot(xs, ys, color=colour, marker=marker, markersize=3.5, linestyle=dashes)
            ends[name] = (xs[-1], ys[-1])
            colours.append(colour)
        axes.set_xlabel(one_line(x))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        label_ends(axes, ends, colours)

    return svg_chart(
        draw,
        _OVERLAY_SIZE,
        {"right": room_for(lines, _OVERLAY_SIZE[0]), "bottom": 0.17, "left": 0.14},
    )


def svg_chart(
    draw: Callable[[Any], None],
    size: tuple[float, float] = _SIZE,
    margins: Mapping[str, float] | None = None,
) -> str:
    """Draw a chart on matplotlib axes and return its SVG element.

    Margins are the edges of the axes as fractions of the figure; they override the defaults.
    """

    def fill(figure: Any) -> None:
        figure.subplots_adjust(**{**_MARGINS, **(margins or {})})
        draw(figure.add_subplot())

    return figure_svg(fill, size)


def figure_svg(fill: Callable[[Any], None], size: tuple[float, float]) -> str:
    """Return the SVG element of a matplotlib figure, with the variables of `COLOURS`.

    The drawing code uses the colours of this module. The size is in inches.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # Without pyplot, which would choose a screen backend. Its fonts lack some characters, which
    # does not matter: the browser uses its own.
    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure = Figure(figsize=size, dpi=72)  # as in the SVG, where a pixel is a point
        FigureCanvasSVG(figure)
        fill(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _themed(file.getvalue())


def _themed(svg: str) -> str:
    """Extract the SVG element from the file; adapt its size and colours to the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: m.group() if m.group(1) in used else "", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    for colour, name in COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg.replace("<svg", '<svg role="img"', 1).strip()


def _widen(axes: Any, span: float) -> None:
    low, high = axes.get_ylim()
    if high - low < span:
        middle = (low + high) / 2
        axes.set_ylim(middle - span / 2, middle + span / 2)


def thinned(points: Points) -> tuple[list[float], list[float]]:
    """Return the points as x and y; average neighbours if there are too many."""
    kept = np.array([(x, y) for x, y in points if y is not None], dtype=float).reshape(-1, 2)
    kept = kept[np.isfinite(kept).all(1)].clip(-_LARGEST, _LARGEST)
    if len(kept) > _MOST_POINTS:
        kept = np.array([part.mean(0) for part in np.array_split(kept, _MOST_POINTS)])
    return kept[:, 0].tolist(), kept[:, 1].tolist()


def _spread(count: int, most: int) -> list[int]:
    """Choose at most `most` indices, evenly."""
    return [*range(count)] if count <= most else [i * count // most for i in range(most)]


def short_name(name: str) -> str:
    """Shorten a name for a chart."""
    return one_line(name, _MOST_AT_AN_END)


def room_for(names: Iterable[str], width: float) -> float:
    """Return the right edge of axes, as a fraction of the figure, that leaves room for names.

    `width` is the width of the figure, in inches.
    """
    longest = max((len(short_name(name)) for name in names), default=0)
    return 0.95 - _CHARACTER_WIDTH * longest / (72 * width)


def label_ends(axes: Any, ends: Mapping[str, tuple[float, float]], colours: Sequence[str]) -> None:
    """Write each name to the right of the axes, at the height of the end of its line.

    The axes must have their final limits; `ends` are the last points of the lines.
    """
    axes.autoscale_view()
    heights = {name: axes.transData.transform(point)[1] for name, point in ends.items()}
    extent = axes.get_window_extent()
    placed = spread_apart(list(heights.values()), _LINE_HEIGHT, extent.y0, extent.y1)
    for name, colour, y in zip(heights, colours, placed, strict=True):
        axes.annotate(
            short_name(name),
            (extent.x1 + 6, y),
            xycoords="figure pixels",
            fontsize=_NAME_SIZE,
            color=colour,
            va="center",
            annotation_clip=False,
        )


def spread_apart(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move values apart until neighbours differ by a gap, or by less if space is short."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    gap = min(gap, (high - low) / max(len(values) - 1, 1))
    placed = [0.0] * len(values)
    place = low - gap
    for i in order:
        place = placed[i] = max(values[i], place + gap)
    place = high + gap
    for i in reversed(order):
        place = placed[i] = min(placed[i], place - gap)
    return placed


WORST = 20  # examples shown
MARKS = "Green entities are in both; dotted orange ones in one only"
_MOST_CLASSES = 12  # labels of a confusion matrix; with more, the most confused pairs are listed
_MOST_SCORES = 40  # rows in the table of classes


MarkedPart: TypeAlias = tuple[str, str, bool]


@dataclass(frozen=True)
class Chart:
    """A chart with its caption."""

    title: str
    svg: Markup
    note: str = ""


@dataclass(frozen=True)
class ChartGroup:
    """Charts of one kind, with a title and a sentence; `wide` charts contain names."""

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

    `marked` lists texts with entities as (name, [(text, entity or "", whether both have it)]).
    `picture` is the address of an image, data:image/png.
    """

    texts: list[str]
    facts: list[tuple[str, str, str]] = field(default_factory=list)
    marked: list[tuple[str, list[MarkedPart]]] = field(default_factory=list)
    picture: str = ""


@dataclass(frozen=True)
class Section:
    """A section of the page: a title, a sentence, and its content."""

    id: str
    title: str
    note: str = ""
    charts: list[Chart] = field(default_factory=list)
    table: ShownTable | None = None
    matrix: Matrix | None = None
    examples: list[Shown] = field(default_factory=list)


def prediction_sections(predictions: PredictionFile) -> list[Section]:
    """Return the sections for a kind of predictions."""
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


def _score_section(scores: Sequence[ClassScore], noun: str) -> Section:
    chosen = scores
    note = ""
    if len(scores) > _MOST_SCORES:
        chosen = sorted(scores, key=lambda s: s.f1)[:_MOST_SCORES]
        note = f"{_MOST_SCORES} of {len(scores):,}, the lowest F1 first."
    rows = [
        (s.name, f"{s.precision:.3f}", f"{s.recall:.3f}", f"{s.f1:.3f}", f"{s.support:,}")
        for s in chosen
    ]
    table = ShownTable((noun, "precision", "recall", "F1", "examples"), rows)
    return Section("scores", f"Scores by {noun}", note, table=table)


def _numbers(predictions: PredictionFile) -> list[Section]:
    rows = predictions.rows
    true, predicted = ([float(row[n]) for row in rows] for n in ("label", "prediction"))
    residuals = [p - t for t, p in zip(true, predicted, strict=True)]
    mean = sum(residuals) / len(residuals)
    charts = [
        Chart("Predicted by true number", Markup(scatter_chart(true, predicted))),
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
                ("predicted", f"{predicted[i]:.3f}", "wrong"),
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
        true, predicted = ({tuple(span) for span in row[n]} for n in ("label", "prediction"))
        return len(true ^ predicted)

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
    """Format the probabilities of the true and predicted labels."""
    named = dict.fromkeys([*row["label"], *row["prediction"]])
    return ", ".join(f"{label} {row['scores'].get(label, 0.0):.3f}" for label in named)


def marked_text(
    text: str, spans: Sequence[Sequence[Any]], others: Sequence[Sequence[Any]]
) -> list[MarkedPart]:
    """Split a text at its entities; mark each as present or absent in the other list.

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


def _images(predictions: PredictionFile) -> list[Section]:
    rows = predictions.rows
    losses = [float(row["loss"]) for row in rows]
    chart = Chart("Loss of each image", Markup(histogram_chart(losses, "loss")))
    with_image = [row for row in rows if row[PICTURE]]
    shown = [Shown(row["texts"], picture=row[PICTURE]) for row in with_image[:WORST]]
    note = f"What the adapter makes of prompts of the evaluation, at step {predictions.step:,}."
    gallery = [Section("images", "Images", note, examples=shown)] if shown else []
    return [Section("quality", "Loss of the images", charts=[chart]), *gallery]


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
    "images": _images,
}

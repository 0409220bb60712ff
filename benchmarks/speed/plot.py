"""Draw the records of this folder's scripts: docs/assets/speed.svg, and speed-dark.svg.

    python benchmarks/speed/plot.py

Each panel has a scale of its own. Ours are circles, peers have other shapes, and each is labelled
once; a bar is the spread of a measurement: of all runs, or its quartiles.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

if __package__:
    from speed.summary import read
else:
    from summary import read  # run as a script

from adapterhub.pages.figures import FIRST, INK, MUTED, SECOND, THIRD, figure_svg

ASSETS = Path(__file__).parents[2] / "docs/assets"
TITLE = "Time of training, steps, routed batches, loading and epochs, beside peers"
SIZE = (4.2, 9.2)  # inches
SHOWN = 480  # width in a page, in pixels
_FONT = "ui-sans-serif, system-ui, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
# Shapes differ, too, so that colours are not needed.
THEMES = {
    "speed.svg": {
        "ink": "#1f2a44", "muted": "#566078", "grid": "#d5dae3", "first": "#0f766e",
        "second": "#b45309", "third": "#6d4aa3",
    },
    "speed-dark.svg": {
        "ink": "#e6eaf2", "muted": "#a3adc2", "grid": "#3a445a", "first": "#2dd4bf",
        "second": "#fbbf24", "third": "#c4a7f5",
    },
}  # fmt: skip


class Kind(NamedTuple):
    """How the marks of one library look; hollow ones are labelled below."""

    colour: str
    shape: str
    hollow: bool = False


OURS = "adapterhub"
TASKS = {"sst2": "SST-2", "mrpc": "MRPC"}
KINDS = {
    OURS: Kind(FIRST, "o"),
    "in fp32": Kind(FIRST, "o", True),
    "with the cache": Kind(FIRST, "o"),
    "without": Kind(MUTED, "s", True),
    "peft + Trainer": Kind(SECOND, "s"),
    "peft by hand": Kind(SECOND, "^", True),
    "peft": Kind(SECOND, "s"),
    "adapters": Kind(THIRD, "D"),
}


class Mark(NamedTuple):
    """A measurement: its middle and its spread."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class Panel:
    """Measurements of the same kind: rows, each with a mark for each library, ours first."""

    title: str
    rows: Mapping[str, Mapping[str, Mark]]
    log: bool = False
    start: float = 0.0


def panels() -> Iterator[Panel]:
    """Yield what the records have."""
    yield Panel("Training, the whole command: seconds", training())
    yield Panel("A step of 32 x 64 tokens: milliseconds", steps())
    yield Panel("64 rows, routed: multiples of the plain forward", routing(), start=0.95)
    yield Panel("With 64 adapters attached: milliseconds", lifecycle(), log=True)
    yield Panel("A later epoch, frozen layers cached: seconds", frozen_cache(), log=True)


def training() -> dict[str, dict[str, Mark]]:
    """Return the seconds of `training.py`."""
    names = {"adapterhub": OURS, "trainer": "peft + Trainer", "loop bf16": "peft by hand"}

    def seconds(runs: Mapping[str, Any]) -> dict[str, Mark]:
        given = {names[name]: each for name, each in runs.items() if name in names}
        return {name: spread([run["seconds"] for run in each]) for name, each in given.items()}

    tasks = read("training")["tasks"]
    return {TASKS.get(task, task): seconds(measured["runs"]) for task, measured in tasks.items()}


def steps() -> dict[str, dict[str, Mark]]:
    """Return the milliseconds of `steps.py`."""
    names = {"ours chosen": OURS, "ours fp32": "in fp32", "adapters": "adapters"}
    return {
        method: {name: spread(times[key]) for key, name in names.items()}
        for method, times in read("steps")["milliseconds"].items()
    }


def routing() -> dict[str, dict[str, Mark]]:
    """Return the multiples of the plain forward pass of `routing.py`."""
    times = read("routing")["milliseconds"]
    plain = times["plain"]["median"]
    rows: dict[str, dict[str, Mark]] = {}
    for name, measured in times.items():
        if name != "plain":
            who = "peft" if name.startswith("peft, ") else OURS
            row = name.removeprefix("peft, ").replace(", ", ",\n")
            rows.setdefault(row, {})[who] = quartiles(measured, plain)
    return rows


def lifecycle() -> dict[str, dict[str, Mark]]:
    """Return the milliseconds of `lifecycle.py`, with the most adapters attached."""
    *_, times = read("lifecycle")["milliseconds"].values()
    return {
        name: {OURS: quartiles(times[name]), "peft": quartiles(times[f"{name}, peft"])}
        for name in ("swap", "load", "attach")
    }


def frozen_cache() -> dict[str, dict[str, Mark]]:
    """Return the seconds of an epoch of `frozen_cache.py`."""
    names = {"memory": "with the cache", "computed": "without"}

    def epoch(seconds: Mapping[str, float]) -> Mark:
        return Mark(seconds["epoch_min"], seconds["epoch"], seconds["epoch_max"])

    return {
        method.replace("layers=", ""): {
            name: epoch(result["seconds"][key]) for key, name in names.items()
        }
        for method, result in read("frozen_cache")["results"].items()
    }


def spread(values: Sequence[float]) -> Mark:
    """Return the median of some runs, and the least and the most."""
    return Mark(min(values), statistics.median(values), max(values))


def quartiles(measured: Mapping[str, float], unit: float = 1.0) -> Mark:
    """Return the median and quartiles of a record, as multiples of a unit."""
    return Mark(*(measured[name] / unit for name in ("low", "median", "high")))


def fill(figure: Any) -> None:
    """Draw all panels on a figure, one below the other."""
    shown = list(panels())
    heights = [len(panel.rows) + 0.5 for panel in shown]
    grid = figure.add_gridspec(
        len(shown),
        height_ratios=heights,
        left=0.28,
        right=0.97,
        top=0.965,
        bottom=0.03,
        hspace=0.55,
    )
    for cell, panel in zip(grid, shown, strict=True):
        draw(figure.add_subplot(cell), panel)


def draw(axes: Any, panel: Panel) -> None:
    """Draw one panel: a row for each work, from the top."""
    axes.set_title(panel.title, fontsize=10, loc="left", x=-0.38, color=INK)
    for place, marks in enumerate(panel.rows.values()):
        for name, mark in marks.items():
            draw_mark(axes, name, mark, place)
        draw_ratios(axes, marks, place)
    axes.set_yticks(range(len(panel.rows)), panel.rows, color=INK)
    axes.set_ylim(len(panel.rows) - 0.4, -0.75)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    scale(axes, panel)
    label(axes, panel)


def draw_mark(axes: Any, name: str, mark: Mark, place: int) -> None:
    """Draw a measurement and its spread."""
    colour, shape, hollow = KINDS[name]
    axes.plot([mark.low, mark.high], [place, place], color=colour, linewidth=3, alpha=0.45)
    face = "none" if hollow else colour
    axes.plot([mark.middle], [place], shape, color=colour, markersize=6.5, markerfacecolor=face)


def draw_ratios(axes: Any, marks: Mapping[str, Mark], place: int) -> None:
    """Write how many times as long the peers of a row take, where it is more than a tenth."""
    ours, *others = marks
    for name in others:
        ratio = marks[name].middle / marks[ours].middle
        if name != "in fp32" and ratio > 1.1:
            axes.annotate(
                f"{ratio:.3g} x" if ratio >= 10 else f"{ratio:.1f} x",
                (max(marks[name].high, marks[name].middle), place), xytext=(7, -3.2),
                textcoords="offset points", fontsize=9, color=INK,
            )  # fmt: skip


def scale(axes: Any, panel: Panel) -> None:
    """Set the horizontal axis: from 0, or logarithmic."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    marks = [mark for row in panel.rows.values() for mark in row.values()]
    low, high = min(mark.low for mark in marks), max(mark.high for mark in marks)
    if panel.log:
        axes.set_xscale("log")
        axes.set_xlim(low / 2.4, high * (high / low) ** 0.2)
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(panel.start, high + 0.19 * (high - panel.start))
        axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def label(axes: Any, panel: Panel) -> None:
    """Label each library once, in the row where the marks are farthest apart."""
    rows = list(panel.rows.values())
    most = max(map(len, rows))
    widest = max(
        (row for row in rows if len(row) == most),
        key=lambda row: max(m.middle for m in row.values()) / min(m.middle for m in row.values()),
    )
    for name, mark in widest.items():
        below = KINDS[name].hollow
        axes.annotate(
            name, (mark.middle, rows.index(widest)), xytext=(0, -13 if below else 6.5),
            textcoords="offset points", ha="center", fontsize=9, color=KINDS[name].colour,
        )  # fmt: skip


def files() -> dict[str, str]:
    """Return the files under docs/assets, by name."""
    drawn = figure_svg(fill, SIZE)
    head = f'<svg width="{SHOWN}" font-family="{_FONT}"'
    drawn = drawn.replace("<svg", head, 1).replace(">", f"><title>{TITLE}</title>", 1) + "\n"
    return {name: themed(drawn, colours) for name, colours in THEMES.items()}


def themed(svg: str, colours: Mapping[str, str]) -> str:
    """Return a picture with the colours of a theme."""
    for name, colour in colours.items():
        svg = svg.replace(f"var(--{name})", colour)
    return svg


if __name__ == "__main__":
    for name, text in files().items():
        (ASSETS / name).write_text(text, encoding="utf-8")

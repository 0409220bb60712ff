"""Leaderboards: scores of one metric on the same rows, and the Pareto front over parameters.

The scores belong to published adapters, by backbone and task, or to a study, with intervals.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup, escape

from adapterhub.errors import one_line
from adapterhub.files.shown_table import ShownTable, TableCell
from adapterhub.pages.figures import FIRST, MUTED, SECOND, Chart, svg_chart
from adapterhub.pages.page import lower_is_better, number_text
from adapterhub.pages.versions import ListedVersion, adapter_page_path, datasets_of

UNKNOWN_ROWS = "evaluated on unknown rows"
_MOST_BOARDS = 20  # of a page
_MOST_CHARTS = 3  # per page: the largest boards
_MOST_ROWS = 240  # per page, in all tables
_FEWEST_ROWS = 5  # of a table

MOST_RANKED = 100  # rows per table
_FEWEST_POINTS = 3  # of a chart
_MOST_NAMED = 5  # labelled points per chart
_ENDS = ("parameters", "low", "high")
_SIZE = (4.8, 2.9)
_MARGINS = {"left": 0.13, "bottom": 0.17, "right": 0.96}


@dataclass(frozen=True)
class RankedScore:
    """A score in a leaderboard.

    Attributes:
        name: the adapter or the method.
        value: the score.
        text: the formatted score.
        interval: its formatted 95 % interval; "" if unknown.
        low: the lower end of the interval.
        high: its upper end.
        parameters: the number of trained parameters; None if unknown, 0 for a constant prediction.
        method: the methods of an adapter.
        date: the date of publication.
        link: the target of the name's link.
        key: the digest of an adapter.
    """

    name: str
    value: float
    text: str
    interval: str = ""
    low: float | None = None
    high: float | None = None
    parameters: int | None = None
    method: str = ""
    date: str = ""
    link: str = ""
    key: str = ""


@dataclass(frozen=True)
class Leaderboard:
    """Scores that may be compared; if `is_ranked` is false, scores on unknown rows.

    Attributes:
        title: the rows or the data set of the scores.
        note: a sentence about them.
        metric: the name of the metric.
        scores: the best first.
        is_ranked: whether all scores use the same rows.
        lower_is_better: whether a smaller score is better.
        most: the maximum number of scores in a table.
        is_drawn: whether a chart is drawn.
    """

    title: str
    note: str
    metric: str
    scores: tuple[RankedScore, ...]
    is_ranked: bool = True
    lower_is_better: bool = False
    most: int = MOST_RANKED
    is_drawn: bool = True

    def rooted(self, root: str) -> Leaderboard:
        """Return the board for a page; `root` is the path from the page to the site's root."""
        scores = tuple(replace(s, link=root + s.link) for s in self.scores)
        return replace(self, scores=scores)

    @property
    def table(self) -> ShownTable:
        """The scores, the best first; scores on the Pareto front are marked."""
        return _table(self)

    @property
    def chart(self) -> Chart | None:
        """Chart of scores against trained parameters; None for too few points."""
        return _chart(self) if self.is_ranked and self.is_drawn else None


def best_first(scores: Iterable[RankedScore], *, lower: bool) -> tuple[RankedScore, ...]:
    """Sort scores, the best first; ties are ordered by fewer parameters."""

    def key(score: RankedScore) -> tuple[float, float, str]:
        size = math.inf if score.parameters is None else score.parameters
        return (score.value if lower else -score.value), size, score.name

    return tuple(sorted((s for s in scores if math.isfinite(s.value)), key=key))


def pareto_front(board: Leaderboard) -> list[int]:
    """Return the indices of scores not matched by another score with as few parameters."""
    best, front = math.inf, []
    sign = 1 if board.lower_is_better else -1
    sized = [(s.parameters, sign * s.value, i) for i, s in enumerate(board.scores) if s.parameters]
    for _, value, place in sorted(sized):
        if value < best:
            best = value
            front.append(place)
    return front


def _table(board: Leaderboard) -> ShownTable:
    shown = board.scores[: board.most]
    columns: list[tuple[str, str, list[TableCell]]] = [
        (board.metric, "", [TableCell(s.text, s.value) for s in shown]),
        ("95 %", "interval", [TableCell(s.interval or "-", s.low) for s in shown]),
        ("trained", "parameters", [_count(s.parameters) for s in shown]),
        ("method", "", [TableCell(s.method or "-") for s in shown]),
        ("published", "", [TableCell(s.date[:10] or "-") for s in shown]),
    ]
    kept = [column for column in columns if any(cell.text != "-" for cell in column[2])]
    ranked = [("rank", "", [TableCell(str(i + 1), i + 1) for i in range(len(shown))])]
    kept = (ranked if board.is_ranked else []) + kept
    return ShownTable(
        ["name", *(title for title, _, _ in kept)],
        [
            [TableCell(score.name, link=score.link), *(cells[i] for _, _, cells in kept)]
            for i, score in enumerate(shown)
        ],
        numbers=True,
        meanings=["", *(meaning for _, meaning, _ in kept)],
        taken=pareto_front(board) if board.is_ranked else (),
    )


def _count(value: int | None) -> TableCell:
    return TableCell("-") if value is None else TableCell(f"{value:,}", value)


def _chart(board: Leaderboard) -> Chart | None:
    sized = {i: score for i, score in enumerate(board.scores) if score.parameters}
    if len({(s.parameters, s.value) for s in sized.values()}) < _FEWEST_POINTS:
        return None
    front = [place for place in pareto_front(board) if place in sized]

    def draw(axes: Any) -> None:
        from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

        sizes = [score.parameters or 1 for score in sized.values()]
        bars = [s for s in sized.values() if s.low is not None and s.high is not None]
        places, low, high = ([getattr(s, name) for s in bars] for name in _ENDS)
        axes.vlines(places, low, high, color=MUTED, linewidth=0.8)
        axes.plot(sizes, [s.value for s in sized.values()], "o", color=FIRST, markersize=5)
        steps = [sized[place] for place in front]
        xs, ys = [s.parameters for s in steps], [s.value for s in steps]
        axes.plot(xs, ys, "o-", color=SECOND, markersize=5, linewidth=1.2)
        axes.set_xscale("log")
        axes.set_xlim(min(sizes) / 2, max(sizes) * 2)
        powers = range(math.ceil(math.log10(min(sizes) / 2)), 1 + int(math.log10(max(sizes) * 2)))
        axes.xaxis.set_major_locator(FixedLocator([10.0**power for power in powers]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.set(xlabel="trained parameters", ylabel=one_line(board.metric, 30))
        _fit(axes, [score.value for score in sized.values()])
        for score in _apart(steps):
            axes.annotate(
                one_line(score.name, 20),
                (score.parameters, score.value),
                xytext=(0, -14 if board.lower_is_better else 7),
                textcoords="offset points",
                ha="center",
                fontsize=8.5,
                color=SECOND,
            )

    title = f"{board.metric} against trained parameters"
    svg = svg_chart(draw, _SIZE, _MARGINS)
    label = escape(f"{title}: {board.title}; the table has the numbers")
    note = "orange: none with as few parameters is as good"
    return Chart(
        title, Markup(svg.replace('role="img"', f'role="img" aria-label="{label}"', 1)), note
    )


def _fit(axes: Any, values: Sequence[float]) -> None:
    """Make room for names; clip outliers that would squeeze the other scores together."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    low, high = ordered[quarter], ordered[-1 - quarter]
    reach = 3 * (high - low) or abs(high) / 10 or 1.0
    ends = max(ordered[0], low - reach), min(ordered[-1], high + reach)
    margin = (ends[1] - ends[0]) * 0.18 or abs(ends[0]) / 10 or 1.0
    axes.set_ylim(ends[0] - margin, ends[1] + margin)


def _apart(scores: Sequence[RankedScore]) -> list[RankedScore]:
    """Choose scores whose names do not overlap, starting from the best."""
    sizes = [math.log(score.parameters or 1) for score in scores]
    gap = (max(sizes) - min(sizes)) / _MOST_NAMED if sizes else 0.0
    chosen: list[int] = []
    for i in reversed(range(len(scores))):
        if all(abs(sizes[i] - sizes[j]) >= gap for j in chosen):
            chosen.append(i)
    return [scores[i] for i in chosen]


def registry_boards(
    versions: Iterable[ListedVersion],
) -> dict[tuple[str, str], list[Leaderboard]]:
    """Return the leaderboards of each backbone and task, ordered by number of adapters.

    Scores are ranked together only if they have the same metric and the same rows.
    """
    groups: dict[tuple[str, str], dict[tuple[str, str], list[ListedVersion]]] = {}
    for each in versions:
        if each.score is not None:
            at = each.entry.backbone, each.entry.task or ""
            rows = each.score.metric, each.entry.evaluation or ""
            groups.setdefault(at, defaultdict(list))[rows].append(each)
    return {at: _boards(published) for at, published in sorted(groups.items())}


def _boards(groups: dict[tuple[str, str], list[ListedVersion]]) -> list[Leaderboard]:
    """Return the boards of a page: ranked boards by size, then unknown rows."""
    ordered = sorted(groups, key=lambda at: (not at[1], -len(groups[at]), at))[:_MOST_BOARDS]
    most = min(max(_MOST_ROWS // len(ordered), _FEWEST_ROWS), MOST_RANKED)
    boards = [_board(*at, groups[at], most) for at in ordered]
    return [replace(board, is_drawn=i < _MOST_CHARTS) for i, board in enumerate(boards)]


def _board(
    metric: str, evaluation: str, versions: Sequence[ListedVersion], most: int
) -> Leaderboard:
    lower = lower_is_better(metric)
    scores = best_first(map(_ranked, versions), lower=lower)
    if not evaluation:
        note = "Their manifests do not record the rows, so these scores are not ranked."
        by_name = tuple(sorted(scores, key=lambda score: score.name))
        return Leaderboard(f"{metric}, {UNKNOWN_ROWS}", note, metric, by_name, False, lower, most)
    shared = set.intersection(*(set(datasets_of(each.entry)) for each in versions))
    title = ", ".join(sorted(shared)) or f"rows {evaluation[:12]}"
    direction = "; lower is better" if lower else ""
    note = f"All on the rows with sha256 {evaluation}{direction}."
    return Leaderboard(f"{metric} on {title}", note, metric, scores, True, lower, most)


def _ranked(each: ListedVersion) -> RankedScore:
    entry, score = each.entry, each.score
    assert score is not None
    error = score.error
    return RankedScore(
        entry.name,
        score.value,
        number_text(score.value),
        error.interval if error else "",
        error.low if error else None,
        error.high if error else None,
        entry.parameters,
        " + ".join(entry.methods),
        entry.published or "",
        adapter_page_path(entry),
        entry.digest,
    )

"""The leaderboards of published adapters: by backbone and task, and by the rows of their scores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from adapterhub.pages.leaderboards import (
    MOST_RANKED,
    Leaderboard,
    RankedScore,
    best_first,
)
from adapterhub.pages.listed import ListedVersion, adapter_page_path
from adapterhub.pages.page import number_text
from adapterhub.pages.published import datasets_of
from adapterhub.pages.run_files import lower_is_better

UNKNOWN_ROWS = "evaluated on unknown rows"
_MOST_BOARDS = 20  # of a page
_MOST_CHARTS = 3  # of a page: those of the largest boards
_MOST_ROWS = 240  # of a page, in all its tables
_FEWEST_ROWS = 5  # of a table


def registry_boards(
    versions: Iterable[ListedVersion],
) -> dict[tuple[str, str], list[Leaderboard]]:
    """Return the leaderboards of each backbone and task, the one with most adapters first.

    Scores are ranked together only if they are of the same metric and of the same rows.
    """
    groups: dict[tuple[str, str], dict[tuple[str, str], list[ListedVersion]]] = {}
    for each in versions:
        if each.score is not None:
            at = each.entry.backbone, each.entry.task or ""
            rows = each.score.metric, each.entry.evaluation or ""
            groups.setdefault(at, defaultdict(list))[rows].append(each)
    return {at: _boards(found) for at, found in sorted(groups.items())}


def _boards(groups: dict[tuple[str, str], list[ListedVersion]]) -> list[Leaderboard]:
    """Return the boards of a page: the ranked ones, the largest first, then unknown rows."""
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

"""`adapterhub compare`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._format import (
    bytes_text,
    print_json,
    print_table,
    say,
    seconds_text,
    shown_score,
)
from adapterhub.cli._options import as_json_option
from adapterhub.config.user_folders import is_folder
from adapterhub.errors import ConfigError
from adapterhub.files.shown_table import TEST, ShownTable

if TYPE_CHECKING:
    from adapterhub.pages.comparison import RunSummary
    from adapterhub.pages.page import RunFiles
    from adapterhub.pages.row_scores import Difference

_MORE_METRICS = 3  # in addition to the main one; --json has all
_MOST_COLUMNS = 4  # runs; more runs become the rows of the table
_NARROW = ("method", "trained", "adapter", "time")


@click.command("compare")
@click.argument("runs", metavar="RUN RUN...", nargs=-1, required=True)
@click.option("--list", "only_list", is_flag=True, help="List runs on different data too.")
@as_json_option
def command(runs: tuple[str, ...], only_list: bool, as_json: bool) -> None:
    """Compare runs: metrics, size, time, and whether a difference is more than chance.

    RUN is the output folder of adapterhub train, an adapter folder or a published name. The first
    one is the baseline. The test compares the predictions on each example of the evaluation data:
    McNemar's exact test for classes, a paired bootstrap otherwise.
    """
    from adapterhub.pages.comparison import check_comparable, pairwise, summary

    if len(runs) < 2:
        raise ConfigError("one run alone has nothing to compare with", expected="two or more runs")
    files = [_read(run) for run in runs]
    names = _short_names(runs)
    if not only_list:
        check_comparable(files, names)
    summaries = [summary(file, name) for file, name in zip(files, names, strict=True)]
    differences = [] if only_list else pairwise(files)
    if as_json:
        print_json(_json(summaries, [(names[i], d) for i, d in differences]))
        return
    print_table(_table(summaries, files[0].main_metric))
    for i, pair in differences:
        for line in difference_lines(names[i], names[0], pair):
            say(line)
    if not only_list and len(differences) + 1 < len(files):
        _say_missing(files, names)


def _read(run: str) -> RunFiles:
    from adapterhub.pages.page import read_run

    if is_folder(run):
        return read_run(run)
    from adapterhub.registry.pull import pull

    return read_run(pull(run))


def _short_names(runs: tuple[str, ...]) -> list[str]:
    """Name each run by the trailing parts of its path that differ."""
    parts = [Path(run).parts if is_folder(run) else (run,) for run in runs]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-count:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return list(runs)


def _table(summaries: list[RunSummary], main: str) -> ShownTable:
    """Build the table: a column for each run, or a row for each if there are many."""
    facts = _facts(summaries, main)
    if len(summaries) <= _MOST_COLUMNS:
        heads, lines = [s.name for s in summaries], [[name, *row] for name, row in facts.items()]
    else:
        heads = ["score", *_NARROW]
        lines = [
            [s.name, _score(s), *(facts[n][i] for n in _NARROW)] for i, s in enumerate(summaries)
        ]
    return ShownTable(["", *heads], lines, numbers=True)


def _score(run: RunSummary) -> str:
    value = run.metrics.get(run.main_metric)
    if value is None:
        return "-"
    return f"{run.main_metric} {shown_score(value, run.errors.get(run.main_metric))}"


def _facts(summaries: list[RunSummary], main: str) -> dict[str, list[str]]:
    """Return the figures of the runs by name, one text for each run."""
    every = {n: None for s in summaries for n in s.metrics}
    metrics = list(dict.fromkeys([main, *([f"{TEST}{main}"] * (f"{TEST}{main}" in every)), *every]))
    shown: dict[str, Callable[[RunSummary], str]] = {
        name: lambda s, n=name: _text(  # type: ignore[misc]
            s.metrics.get(n), lambda v: shown_score(v, s.errors.get(n))
        )
        for name in metrics[: 1 + _MORE_METRICS]
    }
    shown |= {
        "method": lambda s: s.method or "-",
        "trained": lambda s: _text(s.trained, "{:,}".format),
        "adapter": lambda s: _text(s.size, bytes_text),
        "time": lambda s: _text(s.seconds, seconds_text),
        "peak memory": lambda s: _text(s.memory, bytes_text),
        "training rows": lambda s: _text(s.rows, "{:,}".format),
        "eval rows": lambda s: _text(s.evaluation_rows, "{:,}".format),
    }
    if len({s.backbone for s in summaries}) > 1:
        shown["backbone"] = lambda s: s.backbone[:12] or "-"
    return {name: [show(s) for s in summaries] for name, show in shown.items()}


def _text(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)


def difference_lines(name: str, baseline: str, pair: Difference) -> list[str]:
    """Describe the difference of a run from the baseline in one or two lines."""
    interval = f"95 % {pair.low:+.3f} to {pair.high:+.3f}"
    lines = [f"{name} - {baseline}: {pair.value:+.3f} {pair.score} ({interval})"]
    differ = pair.better + pair.worse
    if pair.p is not None and differ:
        lines.append(f"  right on {pair.better} of {differ} disagreements, p = {pair.p:.2g}")
    if not pair.is_significant:
        lines.append("  not significant: the difference may be chance")
    return lines


def _say_missing(files: list[RunFiles], names: list[str]) -> None:
    """Report the runs that cannot be tested, with the reasons."""
    without = [name for name, file in zip(names, files, strict=True) if not file.predictions]
    say(f"no test for {', '.join(without)}: no predictions.jsonl, so it is not known whether the")
    say("evaluation data are the same (train.report=true writes it)")


def _json(summaries: list[RunSummary], differences: list[tuple[str, Difference]]) -> object:
    from dataclasses import asdict

    records = [
        {"run": name, **asdict(d), "significant": d.is_significant} for name, d in differences
    ]
    return {"runs": [asdict(s) for s in summaries], "differences": records}

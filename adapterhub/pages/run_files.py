"""Reads the files of a run folder that reports and comparisons are made from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from adapterhub.config.user_folders import is_file
from adapterhub.config.yaml import load_yaml
from adapterhub.errors import ConfigError, FileError, counted
from adapterhub.files.atomic import UnreadableError, read_lines
from adapterhub.files.manifest import LOWER_IS_BETTER, Manifest
from adapterhub.files.native import Saved, find_adapter
from adapterhub.files.shown_table import ERRORS, ScoreError, recorded_errors
from adapterhub.pages.row_scores import (
    MOST_BYTES,
    EvaluatedRows,
    PredictionFile,
    read_predictions,
    score_errors,
)

Line = dict[str, Any]
BAG_OF_WORDS = "bag_of_words.json"  # in a run folder: the result of `WordsComparison.record`
_MOST_BYTES = 1 << 12  # of a comparison


@dataclass(frozen=True)
class RunFiles:
    """The content of a run folder.

    Attributes:
        folder: the run folder.
        recipe: the recipe, or {}.
        manifest: the manifest of the adapter, once it is saved.
        training: the lines of metrics.jsonl with the loss.
        evaluations: the lines of metrics.jsonl with metrics.
        timings: the lines of timings.jsonl.
        predictions: predictions.jsonl.
    """

    folder: Path
    recipe: Mapping[str, Any]
    manifest: Manifest | None
    training: list[Line]
    evaluations: list[Line]
    timings: list[Line]
    predictions: PredictionFile | None

    @property
    def name(self) -> str:
        """The adapter's name, or the folder's name for an unnamed adapter."""
        named = self.manifest and not self.manifest.is_unnamed
        return self.manifest.name if self.manifest and named else self.folder.resolve().name

    @property
    def record(self) -> Mapping[str, Any]:
        """The training record of the manifest."""
        return self.manifest.training if self.manifest else {}

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the adapter or, before it is saved, of the best evaluation so far."""
        if self.manifest:
            return dict(self.manifest.metrics)
        return dict(self.best["metrics"]) if self.best else {}

    @cached_property
    def errors(self) -> dict[str, ScoreError]:
        """The error of each metric: as recorded, else from predictions of the best evaluation."""
        recorded = recorded_errors(self.record.get(ERRORS))
        if recorded or self.predictions is None:
            return recorded
        rows = EvaluatedRows(len(self.predictions.rows), self.predictions)
        return score_errors(self.metrics, {"": rows})

    @property
    def best(self) -> Line | None:
        """The best evaluation."""
        return next((line for line in reversed(self.evaluations) if line["best"]), None)

    @cached_property
    def main_metric(self) -> str:
        """The metric that selects the best evaluation."""
        options = submapping(self.record, "recipe") or self.recipe
        chosen = submapping(options, "train").get("best_metric")
        if isinstance(chosen, str):
            return chosen
        if self.predictions:
            return self.predictions.metric
        from adapterhub.tasks import parse_task

        if submapping(options, "tasks"):
            return next(iter(name for name in self.metrics if name.startswith("mean")), "mean")
        try:
            return parse_task(options.get("task") or "classification").main_metric
        except ConfigError:
            return next(iter(self.metrics), "loss")

    @property
    def adapter(self) -> Path | None:
        """The folder of the adapter, once it is saved."""
        return find_adapter(self.folder)

    @property
    def trained(self) -> int:
        """The number of trained parameters, including the head."""
        tensors = self.manifest.tensors.values() if self.manifest else ()
        return sum(_count(info.shape) for info in tensors)

    @property
    def size(self) -> int:
        """The total size of the adapter's files, in bytes."""
        return sum(f.stat().st_size for f in self.adapter.iterdir()) if self.adapter else 0


def lower_is_better(metric: str) -> bool:
    """Return whether smaller values of a metric are better."""
    return metric.removeprefix("eval_").rpartition("/")[2] in LOWER_IS_BETTER


def read_run(folder: str | Path) -> RunFiles:
    """Read the files of a run, or of an adapter alone.

    Raises:
        FileError: the folder contains neither a run nor an adapter, or a file is broken.
    """
    folder = Path(folder)
    if folder.name == "adapter" and is_file(folder.parent / "recipe.yaml"):
        folder = folder.parent
    adapter = find_adapter(folder)
    lines = list(_lines(folder / "metrics.jsonl", _METRICS))
    if adapter is None and not lines:
        raise FileError(
            f"no run in {folder}",
            expected="the output folder of adapterhub train, with metrics.jsonl",
        )
    return RunFiles(
        folder=folder,
        recipe=_recipe(folder / "recipe.yaml"),
        manifest=Saved.at(adapter).manifest if adapter else None,
        training=[line for line in lines if line["event"] == "train"],
        evaluations=[line for line in lines if line["event"] == "eval"],
        timings=list(_lines(folder / "timings.jsonl", _TIMINGS)),
        predictions=read_predictions(folder),
    )


def submapping(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a mapping inside a mapping, {} if it is missing."""
    value = parent.get(name)
    return value if isinstance(value, Mapping) else {}


def _recipe(path: Path) -> Mapping[str, Any]:
    return load_yaml(path) if is_file(path) and not path.is_symlink() else {}


_METRICS = {"train": ("epoch", "loss"), "eval": ("epoch",)}
_CLOCK = ("seconds", "examples_per_second", "peak_memory")
_TIMINGS = {"train": _CLOCK, "eval": _CLOCK}


def _lines(path: Path, fields: Mapping[str, tuple[str, ...]]) -> Iterator[Line]:
    """Yield the lines of a metrics file; the last one may be truncated if the run was killed."""
    if not is_file(path) or path.is_symlink() or not path.stat().st_size:
        return
    try:
        lines = read_lines(path, MOST_BYTES)
    except UnreadableError as error:
        raise FileError(f"{path}: {error}", expected="the file as the run wrote it") from None
    for number, text in enumerate(lines, start=1):
        try:
            yield _line(json.loads(text), fields)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if number == len(lines):
                return
            raise FileError(
                f"{path}, line {number} is broken: {error}", expected="the line as it was written"
            ) from error


def _line(line: Any, fields: Mapping[str, tuple[str, ...]]) -> Line:
    """Check the types of a line of metrics.jsonl or timings.jsonl.

    Raises:
        ValueError: a value has another type.
    """
    event, step = line["event"], line["step"]
    values = {name: line[name] for name in fields[event]}
    groups = {name: dict(line.get(name) or {}) for name in ("metrics", "learning_rate")}
    numbers = [*values.values(), *(v for group in groups.values() for v in group.values())]
    wrong = [v for v in numbers if v is not None and not isinstance(v, int | float)]
    if wrong or not isinstance(step, int):
        raise ValueError(f"{str(wrong or step)[:80]} is unexpected")
    clock = {name: values[name] or 0 for name in _CLOCK if name in values}
    best = line.get("best") is True
    return {"event": event, "step": step, **values, **groups, **clock, "best": best}


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


@dataclass(frozen=True)
class WordsComparison:
    """Comparison of an adapter with a bag of words, which needs no backbone, on the same rows.

    Attributes:
        score: the name of the score.
        value: the score of the bag of words.
        rows: the number of rows.
        difference: the score of the adapter minus the score of the bag of words.
        low: the lower end of the 95 % interval of the difference; None if there are too few rows.
        high: the upper end.
        skipped: why no comparison was made; "" if it was.
    """

    score: str = ""
    value: float = 0.0
    rows: int = 0
    difference: float = 0.0
    low: float | None = None
    high: float | None = None
    skipped: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        """The message in two lines: the score, and whether the adapter is better."""
        if self.skipped:
            return "no bag of words was fitted:", self.skipped
        rows = f"on the same {counted(self.rows, 'row')}"
        first = f"a bag of words has {self.score} {self.value:.4f} {rows}"
        if self.low is None or self.high is None:
            return first, f"adapter: {self.difference:+.3f}, of too few rows to compare"
        sign = -1 if lower_is_better(self.score) else 1
        ends = sorted((self.low * sign, self.high * sign))
        verdict = "better" if ends[0] > 0 else "worse" if ends[1] < 0 else "not shown to be better"
        interval = f"95 % {self.low:+.3f} to {self.high:+.3f}"
        return first, f"adapter: {verdict}, {self.difference:+.3f} ({interval})"

    def record(self) -> dict[str, Any]:
        """Return the comparison as a record, with numbers in six digits."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: float(f"{value:.6g}") if isinstance(value, float) else value
            for name, value in values.items()
            if value not in (None, "")
        }


def recorded_words(folder: Path) -> WordsComparison | None:
    """Read a run's comparison with a bag of words; None if it is missing or has another form."""
    path = folder / BAG_OF_WORDS
    try:
        small = not path.is_symlink() and path.stat().st_size <= _MOST_BYTES
        record = json.loads(path.read_bytes()) if small else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    skipped, score = record.get("skipped"), record.get("score")
    if isinstance(skipped, str) and skipped:
        return WordsComparison(skipped=skipped)
    numbers = [_finite(record, name) for name in ("value", "rows", "difference")]
    low, high = (_finite(record, name) for name in ("low", "high"))
    if not isinstance(score, str) or None in numbers:
        return None
    value, rows, difference = (each or 0.0 for each in numbers)
    return WordsComparison(score, value, int(rows), difference, low, high)


def _finite(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None

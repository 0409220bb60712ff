"""The files of a run folder, and `report.html`: one file that shows a run, without network access.

Reports and comparisons of runs are made from the same files. The page has no scripts. Pages of
several runs and of studies use the same frame, and a script that sorts tables.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from markupsafe import Markup

from adapterhub.config.user_folders import is_file
from adapterhub.config.yaml import load_yaml
from adapterhub.data.examples import notes_on_scores
from adapterhub.errors import ConfigError, FileError, counted, printable
from adapterhub.files.atomic import UnreadableError, read_lines, replace_file
from adapterhub.files.card import sources_of, stretches_of
from adapterhub.files.manifest import LOWER_IS_BETTER, Manifest, heads_text
from adapterhub.files.native import Saved, find_adapter
from adapterhub.files.shown_table import (
    ERRORS,
    TEST,
    ScoreError,
    ShownTable,
    recorded_errors,
    score_text,
)
from adapterhub.pages.figures import Chart, Points, Section, line_chart, prediction_sections
from adapterhub.pages.row_scores import (
    FEWEST_ROWS,
    MOST_BYTES,
    EvaluatedRows,
    PredictionFile,
    class_scores,
    difference,
    read_predictions,
    row_score,
    score_errors,
)

if TYPE_CHECKING:
    from jinja2 import Environment


Line = dict[str, Any]
BAG_OF_WORDS = "bag_of_words.json"  # in a run folder: the result of `WordsComparison.record`
RETAINED = "retained.json"  # the result of `RetainedScore.record`
_MOST_BYTES = 1 << 12  # of a comparison
_Comparison = TypeVar("_Comparison", bound="WordsComparison")


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
        return sum(_values_in(info.shape) for info in tensors)

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
_BY_NAME = ("metrics", "learning_rate", "measures")
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
    groups = {name: dict(line.get(name) or {}) for name in _BY_NAME}
    numbers = [*values.values(), *(v for group in groups.values() for v in group.values())]
    wrong = [v for v in numbers if v is not None and not isinstance(v, int | float)]
    if wrong or not isinstance(step, int):
        raise ValueError(f"{str(wrong or step)[:80]} is unexpected")
    clock = {name: values[name] or 0 for name in _CLOCK if name in values}
    best = line.get("best") is True
    return {"event": event, "step": step, **values, **groups, **clock, "best": best}


def _values_in(shape: tuple[int, ...]) -> int:
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

    @classmethod
    def between(
        cls: type[_Comparison], first: PredictionFile, second: PredictionFile, metric: str
    ) -> _Comparison:
        """Return the comparison of two predictions of the same rows: the second minus the first.

        `metric` is a function of sums over rows, or "" for the main score.
        """
        score, gap = row_score(first.kind, metric), difference(first, second, metric)
        value = float(score.summarize(score.columns(first.rows).sum(0)))
        known = len(first.rows) >= FEWEST_ROWS
        ends = (gap.low, gap.high) if known else (None, None)
        return cls(score.name, value, len(first.rows), gap.value, *ends)

    @property
    def lines(self) -> tuple[str, ...]:
        """The message in two lines: the score, and whether the adapter is better."""
        if self.skipped:
            return "no bag of words was fitted:", self.skipped
        rows = f"on the same {counted(self.rows, 'row')}"
        first = f"a bag of words has {self.score} {self.value:.4f} {rows}"
        if self.low is None or self.high is None:
            return first, f"adapter: {self.difference:+.3f}, of too few rows to compare"
        verdict = self.verdict or "not shown to be better"
        interval = f"95 % {self.low:+.3f} to {self.high:+.3f}"
        return first, f"adapter: {verdict}, {self.difference:+.3f} ({interval})"

    @property
    def verdict(self) -> str:
        """Whether the adapter is "better" or "worse"; "" if the interval contains 0."""
        sign = -1 if lower_is_better(self.score) else 1
        ends = sorted(sign * (each or 0.0) for each in (self.low, self.high))
        return "better" if ends[0] > 0 else "worse" if ends[1] < 0 else ""

    def record(self) -> dict[str, Any]:
        """Return the comparison as a record, with numbers in six digits."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: float(f"{value:.6g}") if isinstance(value, float) else value
            for name, value in values.items()
            if value not in (None, "")
        }


class RetainedScore(WordsComparison):
    """Comparison of a backbone with its adapter on, and off, on rows of other data.

    `value` is the score of the backbone without the adapter, `difference` what the adapter adds.
    """

    @property
    def lines(self) -> tuple[str, ...]:
        """The message in two lines: the score of the backbone, and what the adapter changes."""
        first = f"{self.score} {self.value:.4f} without the adapter, on {counted(self.rows, 'row')}"
        if self.low is None or self.high is None:
            return first, f"with it: {self.difference:+.4f}, of too few rows to compare"
        verdict = self.verdict or "not shown to differ"
        interval = f"95 % {self.low:+.4f} to {self.high:+.4f}"
        return first, f"with it: {verdict}, {self.difference:+.4f} ({interval})"


def recorded_words(folder: Path) -> WordsComparison | None:
    """Read a run's comparison with a bag of words; None if it is missing or has another form."""
    return _recorded(folder / BAG_OF_WORDS)


def recorded_retained(folder: Path) -> RetainedScore | None:
    """Read a run's score on the rows to retain; None if it is missing or has another form."""
    recorded = _recorded(folder / RETAINED)
    return None if recorded is None or recorded.skipped else RetainedScore(**vars(recorded))


def retained_title(rows: object) -> str:
    """Return the words before a `RetainedScore`: of rows to retain, or of the run's own rows."""
    return "retained" if rows else "off and on"


def _recorded(path: Path) -> WordsComparison | None:
    """Read a comparison; None if it is missing or has another form."""
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


PAGE = "report.html"
RELOAD = 10  # seconds between browser reloads for a run in progress


@dataclass(frozen=True)
class Tile:
    """A prominent number, with its name and a remark."""

    name: str
    value: str
    note: str = ""


def write_page(folder: Path, output: Path | None = None, *, live: bool = False) -> Path:
    """Write the page of a run, and return its path.

    The default is `report.html` in the run folder; `output` overrides it. With `live`, the run is
    still in progress, and the browser reloads the page.

    Raises:
        FileError: the folder does not contain a run, or one of its files is broken.
        OSError: the file cannot be written.
    """
    path = output or folder / PAGE
    replace_file(path, page_html(read_run(folder), live=live).encode())
    return path


def page_html(run: RunFiles, *, live: bool = False) -> str:
    """Return the page of a run; with `live`, the browser reloads it."""
    return render_template(
        "page.html",
        name=run.name,
        subtitle=_subtitle(run),
        reload=RELOAD if live else 0,
        state=_state(run),
        notes=_notes(run),
        tiles=[*_tiles(run)],
        sections=(sections := [*_sources(run), *_curves(run), *_predicted(run), *_speed(run)]),
        has_pictures=any(example.picture for each in sections for example in each.examples),
        facts=_facts(run),
    )


def render_template(template: str, **values: Any) -> str:
    """Render a template of this room; all texts are escaped."""
    return str(_environment().get_template(template).render(**values))


@cache
def _environment() -> Environment:
    """Return the environment that compiles each template once, for thousands of pages."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("adapterhub.pages", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_safe,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _safe(value: Any) -> Any:
    """Escape characters that reorder or hide text; jinja2 then escapes markup."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def framed_page(template: str, scripts: tuple[str, ...] = ("sort.js",), **values: Any) -> str:
    """Render a page based on `frame.html`, with scripts of this room.

    The Content-Security-Policy of the page allows scripts by hash, so no other script can run.
    """
    script, digest = _script(scripts)
    return render_template(template, script=script, script_hash=digest, **values)


@cache
def _script(names: tuple[str, ...]) -> tuple[Markup, Markup]:
    """Join scripts, and return the result with its hash."""
    files = resources.files("adapterhub.pages")
    script = "".join(files.joinpath(name).read_text(encoding="utf-8") for name in names)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Markup(script), Markup(f"sha256-{digest}")


def _subtitle(run: RunFiles) -> str:
    record = submapping(run.record, "recipe") or run.recipe
    methods = run.manifest.methods if run.manifest else [record.get("method", "")]
    names = ", ".join(next(iter(m)) if isinstance(m, Mapping) and m else str(m) for m in methods)
    backbone = run.manifest.backbone.id if run.manifest else record.get("backbone", "")
    return " · ".join(filter(None, (names, _spec_name(record.get("task")), str(backbone))))


def _spec_name(spec: Any) -> str:
    return str(next(iter(spec), "")) if isinstance(spec, Mapping) else str(spec or "")


def _state(run: RunFiles) -> str:
    if run.manifest:
        return ""
    lines = [*run.training, *run.evaluations]
    step = max((line["step"] for line in lines), default=0)
    return f"The run is not finished: this is step {step:,}."


def _tiles(run: RunFiles) -> Iterator[Tile]:
    """Yield the main metric, the other metrics, and the resources used by the run."""
    main, metrics = run.main_metric, run.metrics
    notes = {name: str(error) for name, error in run.errors.items()}
    if main in metrics:
        note = "; ".join(filter(None, (notes.get(main), _best_note(run))))
        yield Tile(main, number_text(metrics[main]), note)
    in_table = tuple(
        f"{before}{source.name}/" for source in sources_of(run.record) for before in ("", TEST)
    )
    for name, value in metrics.items():
        if name != main and not (in_table and name.startswith(in_table)):
            yield Tile(name, number_text(value), notes.get(name, ""))
    if run.trained:
        total = run.record.get("backbone_parameters")
        share = f"{run.trained / total:.2%} of the backbone" if isinstance(total, int) else ""
        yield Tile("trained parameters", f"{run.trained:,}", share)
    if run.timings:
        seconds = run.timings[-1]["seconds"]
        peak = max(line["peak_memory"] for line in run.timings)
        yield Tile("time", _duration(seconds))
        yield Tile("peak memory", f"{peak / 1e9:.2f} GB")
    if run.size:
        yield Tile("adapter", f"{run.size / 1e6:.2f} MB")


def _sources(run: RunFiles) -> Iterator[Section]:
    """Yield a table of the sources of the training rows and their scores, if there are several."""
    if not (sources := sources_of(run.record)):
        return
    scores: dict[str, dict[str, str]] = {}
    for source in sources:
        for before in ("", TEST):
            start = f"{before}{source.name}/"
            for name in filter(lambda name: name.startswith(start), run.metrics):
                text = score_text(number_text(run.metrics[name]), run.errors.get(name))
                scores.setdefault(f"{before}{name.removeprefix(start)}", {})[source.name] = text
    rows = [
        (
            each.name,
            f"{each.train:,}" if each.train else "-",
            f"{each.evaluation:,}" if each.evaluation else "-",
            f"{each.share:.1%}",
            *(of.get(each.name, "-") for of in scores.values()),
        )
        for each in sources
    ]
    table = ShownTable(("source", "rows", "evaluated", "share", *scores), rows, numbers=True)
    note = "The share is that of the drawn rows."
    yield Section("sources", "Sources", note, table=table)


def _notes(run: RunFiles) -> list[str]:
    """List caveats of the scores: few rows, a single class, or rows that also picked the epoch.

    The score on rows of other data, if the run has one, comes first.
    """
    retained = recorded_retained(run.folder)
    title = retained_title(submapping(run.recipe, "data").get("retain"))
    before = [f"{title}: {'; '.join(retained.lines)}"] if retained else []
    error = run.errors.get(run.main_metric)
    if error is None:
        return before
    file = run.predictions
    labels = {row["label"] for row in file.rows} if file and file.kind == "classes" else ()
    notes = [*before, *notes_on_scores(error.rows, labels)]
    if words := recorded_words(run.folder):
        notes.append(" ".join(words.lines) if words.skipped else "; ".join(words.lines))
    if len(run.evaluations) > 1:
        tested = any(name.startswith(TEST) for name in run.metrics)
        notes.append(chosen_note(run.evaluations, error.rows, tested=tested))
    if any(each.interval for each in run.errors.values()):
        notes.append("Below a score: its 95 % interval over the rows, and their number n.")
    return [f"{note[0].upper()}{note[1:].removesuffix('.')}." for note in notes]


def chosen_note(evaluations: Sequence[Mapping[str, Any]], rows: int, *, tested: bool) -> str:
    """State that the rows of the scores also picked the epoch, and how to get independent rows."""
    by_epoch = all(each["epoch"] == round(each["epoch"]) for each in evaluations)
    picked = f"these {rows:,} rows also picked the {'epoch' if by_epoch else 'step'}"
    if tested:
        return f"{picked}; the test rows picked nothing"
    return f"optimistic: {picked}; try --test 0.1"


def _best_note(run: RunFiles) -> str:
    """State the best step, and the score of always predicting the most frequent class."""
    notes = [f"step {run.best['step']:,}"] if run.best else []
    if lower_is_better(run.main_metric):
        notes.append("lower is better")
    file = run.predictions
    if file and file.kind == "classes" and run.main_metric == "accuracy":
        most = max(class_scores(file.rows, ()), key=lambda score: score.support)
        notes.append(f"always {most.name[:30]!r}: {most.support / len(file.rows):.3f}")
    return "; ".join(notes)


def number_text(value: float | None) -> str:
    """Format a metric with three or four digits."""
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.2f}"


def _curves(run: RunFiles) -> Iterator[Section]:
    """Yield the loss, the learning rates and each metric by step."""
    charts = []
    if run.training:
        losses = points_by_step(run.training, lambda line: line["loss"])
        charts.append(_chart("Training loss", {"loss": losses}))
    for name in dict.fromkeys(name for line in run.training for name in line["measures"]):
        points = points_by_step(run.training, lambda line, n=name: line["measures"].get(n))
        charts.append(_chart(f"Training: {name}", {name: points}))
    best = run.best["step"] if run.best else None
    metrics = {n: None for line in run.evaluations for n in line["metrics"]}
    ordered = sorted(metrics, key=lambda name: name != run.main_metric)
    for name in ordered if len(run.evaluations) > 1 else ():
        points = points_by_step(run.evaluations, lambda line, n=name: line["metrics"].get(n))
        error = run.errors.get(name)
        remarks = (
            "lower is better" if lower_is_better(name) else "",
            f"n = {error.rows:,}" if error else "",
        )
        note = ", ".join(filter(None, remarks))
        span = 0.1 * max((abs(v) for _, v in points if v is not None), default=0.0)
        title = f"Evaluation: {name}"
        svg = line_chart({name: points}, "step", best=best, span=span, log=True)
        charts.append(Chart(title, Markup(svg), note))
    groups = {n: None for line in run.training for n in line["learning_rate"]}
    if groups:
        rates = {
            n: points_by_step(run.training, lambda line, n=n: line["learning_rate"].get(n))
            for n in groups
        }
        charts.append(_chart("Learning rate", rates))
    if charts:
        note = "The circle marks the evaluation whose tensors were kept." if best else ""
        yield Section("curves", "Curves", note, charts)


def points_by_step(lines: Sequence[Line], value: Any) -> Points:
    """Return one value from each line of a run's file, by step."""
    return [(line["step"], value(line)) for line in lines]


def _chart(title: str, lines: dict[str, Points]) -> Chart:
    return Chart(title, Markup(line_chart(lines, "step")))


def _predicted(run: RunFiles) -> list[Section]:
    if run.predictions:
        return prediction_sections(run.predictions)
    note = (
        "The run folder has no predictions.jsonl, so its examples cannot be shown: the run is of "
        "an older version, or its rows were packed."
    )
    return [Section("predictions", "Predictions", note)]


def _speed(run: RunFiles) -> Iterator[Section]:
    lines = [line for line in run.timings if line["event"] == "train"]
    if len(lines) > 1:
        speed = points_by_step(lines, lambda line: line["examples_per_second"])
        memory = points_by_step(lines, lambda line: line["peak_memory"] / 1e9)
        charts = [
            Chart(title, Markup(line_chart({title: points}, "step", zero=True)))
            for title, points in (
                ("Examples per second", speed),
                ("Peak memory so far, GB", memory),
            )
        ]
        yield Section("speed", "Speed and memory", charts=charts)


def _facts(run: RunFiles) -> list[tuple[str, str]]:
    """List the facts of the run: method, backbone and data."""
    manifest, recipe = run.manifest, submapping(run.record, "recipe") or run.recipe
    train, data = submapping(recipe, "train"), submapping(run.record, "data")
    backbone = manifest.backbone if manifest else None
    facts = {
        "backbone": backbone.id if backbone else recipe.get("backbone"),
        "weights": f"fingerprint {backbone.fingerprint}" if backbone else None,
        "quantization": backbone.quantization if backbone else recipe.get("quantize"),
        "method": _specs(recipe.get("method")),
        "task": None if recipe.get("tasks") else _specs(recipe.get("task")),
        "labels": _cut(", ".join(manifest.labels)) if manifest else None,
        "heads": _cut(heads_text(manifest)) if manifest else None,
        "mixing": _specs(recipe.get("mixing")) if recipe.get("tasks") else None,
        "training examples": _count(data.get("train")),
        "evaluation examples": _count(data.get("eval")),
        "test examples": _count(data.get("test")),
        "data": _short(data.get("sha256")),
        "steps": _count(run.record.get("steps")),
        "resumed": "; ".join(stretches_of(run.record)),
        "batch size": train.get("batch_size"),
        "learning rate": train.get("learning_rate"),
        "schedule": train.get("schedule"),
        "longest input": f"{train['max_length']} tokens" if train.get("max_length") else None,
        "seed": recipe.get("seed"),
        "versions": ", ".join(f"{n} {v}" for n, v in manifest.versions.items()) if manifest else "",
    }
    return [(name, str(value)) for name, value in facts.items() if value not in (None, "")]


def _specs(spec: Any) -> str:
    """Format method or task specs as in a recipe, without options that are off."""
    if isinstance(spec, list | tuple):
        return " + ".join(map(_specs, spec))
    if not isinstance(spec, Mapping):
        return str(spec or "")
    return " + ".join(f"{name}{_options(options)}" for name, options in spec.items())


def _options(options: Any) -> str:
    items = options.items() if isinstance(options, Mapping) else ()
    text = ", ".join(f"{k}={v}" for k, v in items if v not in (None, False, "", [], {}, ()))
    return f"({_cut(text)})" if text else ""


def _cut(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:400]}..."


def _count(value: Any) -> str | None:
    return f"{value:,}" if isinstance(value, int) else None


def _short(digest: Any) -> str | None:
    return f"sha256 {digest[:12]}" if isinstance(digest, str) else None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"

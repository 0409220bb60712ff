"""`report.html`: one file that shows a run, without network access and without scripts.

Pages of several runs and of studies use the same frame, and a script that sorts tables.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from markupsafe import Markup

from adapterhub.data.examples import notes_on_scores
from adapterhub.errors import printable
from adapterhub.files.atomic import replace_file
from adapterhub.files.card import stretches_of
from adapterhub.files.manifest import heads_text
from adapterhub.files.shown_table import TEST, ShownTable
from adapterhub.pages.figures import (
    Points,
    histogram_chart,
    line_chart,
    reliability_chart,
    scatter_chart,
)
from adapterhub.pages.row_scores import (
    PICTURE,
    ClassScore,
    Outcome,
    PredictionFile,
    calibration,
    class_scores,
    confusions,
    is_right,
    span_scores,
)
from adapterhub.pages.run_files import (
    Line,
    RunFiles,
    lower_is_better,
    read_run,
    recorded_words,
    submapping,
)

if TYPE_CHECKING:
    from jinja2 import Environment


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
        sections=(sections := [*_curves(run), *_predicted(run), *_speed(run)]),
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
    for name, value in metrics.items():
        if name != main:
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


def _notes(run: RunFiles) -> list[str]:
    """List caveats of the scores: few rows, a single class, or rows that also picked the epoch."""
    error = run.errors.get(run.main_metric)
    if error is None:
        return []
    file = run.predictions
    labels = {row["label"] for row in file.rows} if file and file.kind == "classes" else ()
    notes = notes_on_scores(error.rows, labels)
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
    best = run.best["step"] if run.best else None
    metrics = {n: None for line in run.evaluations for n in line["metrics"]}
    ordered = sorted(metrics, key=lambda name: name != run.main_metric)
    for name in ordered if len(run.evaluations) > 1 else ():
        points = points_by_step(run.evaluations, lambda line, n=name: line["metrics"].get(n))
        error = run.errors.get(name)
        told = (
            "lower is better" if lower_is_better(name) else "",
            f"n = {error.rows:,}" if error else "",
        )
        note = ", ".join(filter(None, told))
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
    given = options.items() if isinstance(options, Mapping) else ()
    text = ", ".join(f"{k}={v}" for k, v in given if v not in (None, False, "", [], {}, ()))
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

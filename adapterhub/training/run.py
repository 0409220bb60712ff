"""A training run from its recipe to its files: prepare, train, save. Several runs share a backbone.

A run reports to trackers, in predictions.jsonl and report.html, and as text.

Trackers (Weights & Biases, MLflow, Trackio and others supported by accelerate) receive the loss,
the learning rates, the speed and the metrics, and the recipe without local paths. They never
receive texts of the data. `trackers.json` in the run folder stores the ids of the run, so that a
resumed run continues in the trackers. If predictions or the page cannot be written during the run,
a note is reported.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adapterhub.adapters.adapter import STOPS
from adapterhub.backbones.quantized import cpu_note, size_of
from adapterhub.config.options import is_neutral, to_dict
from adapterhub.config.user_folders import is_folder
from adapterhub.data.options import DataOptions
from adapterhub.errors import AdapterhubError, ConfigError, OutputError, counted, one_line
from adapterhub.files.atomic import replace_file
from adapterhub.files.shown_table import ERRORS, TEST, ScoreError, recorded_errors
from adapterhub.loop import checkpoint, loop
from adapterhub.loop.engine import BatchList, Engine, LazyBatches, batch_order, model_loss
from adapterhub.loop.loop import DATA, STRETCHES, RunProgress
from adapterhub.loop.processes import (
    Stopped,
    catch_stop_signals,
    divided_evaluation,
    from_main,
    is_main,
    own_device,
    readers,
    wait_for_everyone,
)
from adapterhub.loop.report import Evaluated, Reporter, Several, Timing, TrainingLine
from adapterhub.loop.speedups import Speedups, Trial, with_and_without_padding
from adapterhub.loop.trainee import AdapterTrainee, unfreeze_all, unreached
from adapterhub.methods.common.base import dump_methods, parse_methods
from adapterhub.pages.page import BAG_OF_WORDS, WordsComparison, chosen_note, write_page
from adapterhub.pages.row_scores import (
    PREDICTIONS,
    EvaluatedRows,
    PredictionFile,
    outcomes_of,
    read_predictions,
    score_errors,
)
from adapterhub.recipe.output_folder import RECIPE, TRACKED, hold_output, writing
from adapterhub.recipe.recipe import (
    DATA_SOURCES,
    SCHEMA_LINE,
    Recipe,
    RunOptions,
    dump_mixing,
    parse_mixing,
    read,
    steps_per_epoch,
    write_schema,
)
from adapterhub.speed.compiled_layers import compiled_layers, liger_kernels
from adapterhub.speed.frozen_cache import frozen_layers
from adapterhub.speed.head_loss import choose_head_loss
from adapterhub.status import doing
from adapterhub.tasks import Encoded, Prediction, Task, dump_task, parse_task
from adapterhub.tasks.common.infer_task import DEFAULT
from adapterhub.training.calibration import STARTS, calibrate_run
from adapterhub.training.loading import BackboneLoader, KernelChoice, SharedLoader
from adapterhub.training.prepare import PreparedRun, prepare
from adapterhub.training.run_data import RunData, check_recipe
from adapterhub.training.stream import BUFFER, StreamBatches, StreamedRows
from adapterhub.training.task_mixture import MixedRows, TaskRows, mixed_order
from adapterhub.training.word_baseline import compare_with_words

MOST_STEPS = 10**9  # per run: its record is checked before it begins


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run: the adapter's folder, metrics and sizes, a verdict and the report.

    `words` compares the run with a bag of words, if that is a baseline of the task. `tested`
    contains the metrics of the test rows. `errors` contains the error of each metric; metrics in
    `tested` are called "test/NAME" there.
    """

    folder: Path
    metrics: dict[str, float]
    result: loop.TrainingResult
    parameters: int
    head_parameters: int
    adapter_bytes: int
    verdict: tuple[str, ...] = ()
    page: Path | None = None
    tested: dict[str, float] = field(default_factory=dict)
    errors: dict[str, ScoreError] = field(default_factory=dict)
    words: WordsComparison | None = None


def run(
    recipe: Recipe,
    reporter: Reporter,
    *,
    resume: bool = False,
    data: RunData | None = None,
    loader: BackboneLoader | None = None,
    ended: Callable[[PreparedRun, RunOutcome], None] | None = None,
) -> RunOutcome:
    """Train, evaluate and save.

    The output folder gets `adapter/` (the files to publish), `recipe.yaml` with its schema for
    editors, `metrics.jsonl`, `timings.jsonl`, `checkpoints/`, and `report.html` with its data,
    `predictions.jsonl` and `bag_of_words.json`. With several processes, the first one writes them.
    `ended` is called while the model still has the adapter with its best tensors.

    Raises:
        AdapterhubError: of any type; the folder is neither created nor changed unless training
            could start.
    """
    loader, checked = loader or BackboneLoader(), check_recipe(recipe, resume)
    prepared = prepare(checked, data, _kernels_of(recipe) if resume else None, loader)
    try:
        latest = _latest(prepared)
        reporter, page = _reports(prepared, reporter, resume, latest)
        written = partial(_write_recipe, prepared.data.completed(recipe), prepared)
        with hold_output(Path(recipe.output), resume) if is_main() else nullcontext():
            try:
                session = training_session(prepared, reporter, resume, written, page, latest)
                result = loop.train(session)
            finally:
                unfreeze_all(prepared.adapter)
            outcome = _save(prepared, result, page)
        if ended is not None:
            ended(prepared, outcome)
        return outcome
    finally:
        loader.release(prepared.model)


@dataclass(frozen=True)
class Ended:
    """A finished run of several, with its outcome or an error."""

    recipe: Recipe
    outcome: RunOutcome | None = None
    error: AdapterhubError | None = None


def run_several(
    recipes: Sequence[Recipe], reporter: Callable[[Recipe], Reporter], *, resume: bool = False
) -> Iterator[Ended]:
    """Train recipes one after the other; load, read and compute shared parts once.

    The runs share the backbone, the data, the encoded rows and the outputs of frozen layers
    (`train.frozen_cache`). Each run has a separate output folder and ends with the same bytes as
    alone. With `resume`, a run that had begun is continued. If a run fails, it is yielded with its
    error, and the next one begins. Each note is given once.

    Yields:
        Each run when it has ended.

    Raises:
        Stopped: a signal stopped the current run, after its state was saved.
    """
    loader, said = SharedLoader(), set[str]()
    with catch_stop_signals() as stop:
        for done, recipe in enumerate(recipes):
            if stop.requested:  # at the end of the previous run, without stopping it
                raise Stopped(
                    f"stopped by a signal after {done} of {len(recipes)} runs",
                    hint="run the same command with --resume to continue",
                )
            try:
                data, begun = loader.data(recipe), (Path(recipe.output) / RECIPE).exists()
                reports = _SaidOnce([reporter(recipe)], said)
                ended = run(recipe, reports, resume=resume and begun, data=data, loader=loader)
            except Stopped:
                raise
            except AdapterhubError as error:
                yield Ended(recipe, error=error)
            else:
                yield Ended(recipe, ended)


class _SaidOnce(Several):
    """Forwards each note once, even if several runs give it."""

    def __init__(self, reporters: list[Reporter], said: set[str]) -> None:
        super().__init__(reporters)
        self.said = said

    def note(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            super().note(text)


def _latest(prepared: PreparedRun) -> LatestPredictions | None:
    """Return the store of the latest predictions in the first process, else None."""
    return LatestPredictions(prepared.data.task, prepared.rows.evaluation) if is_main() else None


def _reports(
    prepared: PreparedRun, reporter: Reporter, resume: bool, latest: LatestPredictions | None
) -> tuple[Reporter, RunPage | None]:
    """Return the reporter with trackers, and the report writer unless it is turned off.

    Only the first process has them.
    """
    if latest is None:
        return reporter, None
    recipe = prepared.recipe
    reporter = Several([reporter, start_trackers(recipe, reporter, resume=resume)])
    if not recipe.train.report:
        return reporter, None
    return reporter, RunPage(Path(recipe.output), latest, reporter.note)


def _kernels_of(recipe: Recipe) -> KernelChoice | None:
    """Return the kernels with which a run to resume was started, if it was started."""
    path = Path(recipe.output) / RECIPE
    if not path.exists():
        return None
    try:
        started = read(path)
    except ConfigError:
        return None
    return KernelChoice(recipe.dtype or started.dtype, recipe.attention or started.attention)


def _write_recipe(recipe: Recipe, prepared: PreparedRun) -> None:
    """Write a recipe in the first process, with its kernels, unless the file is the same already.

    The recipe is written as passed in, without options derived from the data.

    Raises:
        OutputError: the folder has another recipe and no checkpoint, or cannot be written.
    """
    chosen, output = prepared.recipe, Path(recipe.output)
    recipe = replace(recipe, dtype=chosen.dtype, attention=chosen.attention)
    path = output / RECIPE
    if not is_main() or (path.exists() and _is_recipe(path, recipe)):
        return
    if path.exists() and not checkpoint.exists(checkpoint.folder_of(output, "last")):
        raise OutputError(
            f"{path} is another recipe, and there is no checkpoint to resume from",
            expected="the recipe that the run was started with",
            hint=f"delete {path} to train again in this folder, or another --output",
        )
    with writing(path):
        replace_file(path, (SCHEMA_LINE + recipe.to_yaml()).encode())
    with suppress(OSError):  # only editors read it
        write_schema(output)


def _is_recipe(path: Path, recipe: Recipe) -> bool:
    """Return whether a file contains this recipe; the folder may have been moved."""
    try:
        return read(path, flags={"output": recipe.output}) == recipe
    except ConfigError:
        return False


def training_session(
    prepared: PreparedRun,
    reporter: Reporter,
    resume: bool,
    checked: Callable[[], None] = lambda: None,
    page: RunPage | None = None,
    latest: LatestPredictions | None = None,
) -> loop.TrainingSession:
    """Return the session of a prepared run, and report notes for the user.

    `checked` is called after all checks have passed, before anything is written.
    """
    recipe, data = prepared.recipe, prepared.data
    _check_savable(prepared)
    for note in prepared.notes:
        reporter.note(note)
    for warning in unreached(prepared.adapter, begun_epochs(prepared)):
        reporter.note(warning)

    if slow := cpu_note(prepared.model):
        reporter.note(f"note: {slow}")

    trainee, loss = AdapterTrainee(prepared.adapter), prepared.own_loss or model_loss
    last = checkpoint.folder_of(Path(recipe.output), "last")
    init, resumes = prepared.options.init, resume and checkpoint.exists(last)
    if init and (STARTS[init].allots or not resumes):
        first, recomputed = epoch_batches(prepared, 0), prepared.options.gradient_checkpointing
        found = calibrate_run(prepared.adapter, first, init, loss, checkpointing=recomputed)
        reporter.note(str(found))
    stream, items = drawn_batches(prepared), data.task.loss_items(prepared.train)
    divided = prepared.options.shard or prepared.options.tensor_parallel
    return loop.TrainingSession(
        Engine(trainee, prepared.options, loss, items),
        lambda epoch: stream or epoch_batches(prepared, epoch),
        _evaluation(prepared, latest),
        output=Path(recipe.output),
        seed=recipe.seed,
        main_metric=data.task.main_metric,
        resume=resume,
        run=_record(prepared),
        reporter=Several([reporter, page]) if page else reporter,
        checked=checked,
        speedups=_speedups(prepared, reporter.note),
        errors=partial(_error_records, latest),
        save_adapter=None if divided else partial(_save_checkpoint, prepared),
    )


def _error_records(
    latest: LatestPredictions | None, metrics: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Return records of the errors of the latest evaluation's scores."""
    errors = latest.errors(metrics) if latest else {}
    return {name: error.record() for name, error in errors.items()}


def _speedups(prepared: PreparedRun, note: Callable[[str], None]) -> Speedups:
    """Return the possible speedups of a run, in the order in which they are applied."""
    adapter, options, data = prepared.adapter, prepared.options, prepared.data
    has_own, row = bool(prepared.own_loss or data.parts), partial(prepared.train.batch, [0])
    trial = partial(first_batches, prepared)
    chosen = (
        None if has_own else choose_head_loss(adapter, data.task, options, row),
        frozen_layers(adapter, options, prepared.recorded, note),
        liger_kernels(adapter, options, trial, note),
        compiled_layers(adapter, options, trial, note),
    )
    return Speedups([each for each in chosen if each is not None], note)


def _evaluation(
    prepared: PreparedRun, latest: LatestPredictions | None
) -> Callable[[], dict[str, float]] | None:
    """Return the evaluation of a run, which keeps predictions for the report; None without rows."""
    evaluation = prepared.evaluation
    return None if evaluation is None else partial(_evaluate, prepared, evaluation, latest)


def _evaluate(
    prepared: PreparedRun, rows: Encoded, latest: LatestPredictions | None
) -> dict[str, float]:
    options, record = prepared.options, latest.predictions if latest else None
    if record is not None:
        record.clear()
    with divided_evaluation(sharded=bool(options.shard), together=options.tensor_parallel):
        size = options.eval_batch_size
        return prepared.data.task.evaluate(prepared.model, rows, size, record)


def _tested(
    prepared: PreparedRun,
) -> tuple[dict[str, float], dict[str, dict[str, float]], PredictionFile | None]:
    """Evaluate the best tensors on the test rows: metrics, their errors, and predictions."""
    rows = prepared.rows.test
    if rows is None:
        return {}, {}, None
    latest = LatestPredictions(prepared.data.task, rows)
    with torch.no_grad(), doing(f"testing on {len(prepared.data.test):,} rows"):
        metrics = from_main(_evaluate(prepared, rows, latest))
    metrics = {name: float(value) for name, value in metrics.items()}
    return metrics, _error_records(latest, metrics), latest.file(0)


def _record(prepared: PreparedRun) -> dict[str, Any]:
    """Return the record of a run in its checkpoints; checkpoints of other runs are not resumed."""
    adapter = prepared.adapter
    pooling = {"pooling": adapter.pooling.how} if adapter.pooling else {}
    parts = prepared.data.parts or {prepared.data.task.name: prepared.data}
    return {
        "recipe": _identity(prepared.recipe),
        DATA: prepared.digests,
        "labels": {name: list(part.labels) for name, part in parts.items()},
        "backbone": adapter.state.fingerprint(),
        **pooling,
        **prepared.origins.identity(),
    }


def _stops(prepared: PreparedRun) -> dict[str, list[int]]:
    """Return the tokens that end a learned text, if the backbone does not stop at them itself."""
    stops = prepared.data.task.stops(prepared.train.setting)
    new = prepared.adapter.state.new_stops(stops)
    return {STOPS: new} if new else {}


def _identity(recipe: Recipe) -> dict[str, Any]:
    """Return the part of the recipe that determines the adapter's bytes, without local paths."""
    fields = to_dict(recipe) | {
        "method": list(dump_methods(parse_methods(recipe.method))),  # type: ignore[arg-type]
        "task": dump_task(parse_task(recipe.task or DEFAULT)),  # each of several tasks has its own
    }
    # Older versions refuse unknown options, even with a value that changes nothing.
    fields["data"] = _portable(fields["data"])
    if recipe.tasks:
        mixed = fields.pop("tasks")
        fields["tasks"] = {n: own | {"data": _portable(own["data"])} for n, own in mixed.items()}
        fields["mixing"] = dump_mixing(parse_mixing(recipe.mixing))
    else:
        del fields["tasks"], fields["mixing"]
    if recipe.name is None:  # a folder's value, since the folder may be moved
        del fields["name"]
    if recipe.family is None:
        del fields["family"]
    if recipe.attention is None:
        del fields["attention"]
    return {
        k: v for k, v in fields.items() if k not in ("output", "train", "backbone", "from", "on")
    }


def _portable(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data options that change a result, without local paths."""
    usual = to_dict(DataOptions())
    return {
        k: v
        for k, v in data.items()
        if k not in (*DATA_SOURCES, "workers") and not (is_neutral(v) and v == usual[k])
    }


def _describe(
    prepared: PreparedRun,
    steps: int,
    metrics: Mapping[str, float],
    errors: Mapping[str, Any],
    stretches: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Add the record of the run at a step to the adapter, with metrics and their errors."""
    adapter, recipe = prepared.adapter, prepared.recipe
    adapter.metadata.metrics = dict(metrics)
    # A method built from trained adapters records their names, not their original folders.
    method = {"method": list(dump_methods(adapter.methods)), "train": to_dict(recipe.train)}
    adapter.metadata.training = {
        "recipe": _identity(recipe) | method,
        "data": prepared.data_record,
        "kind": prepared.data.task.head,
        "seed": recipe.seed,
        "steps": steps,
        **({STRETCHES: list(stretches)} if stretches else {}),
        **({ERRORS: dict(errors)} if errors else {}),
        **prepared.origins.record(),
        **_stops(prepared),
        "backbone_parameters": sum(map(size_of, adapter.anatomy.parameters().values())),
    }


def _save_checkpoint(
    prepared: PreparedRun,
    folder: Path,
    progress: RunProgress,
    stretches: Sequence[Mapping[str, Any]],
) -> None:
    """Write the adapter's current state after a step, with the metrics of that step."""
    evaluated = bool(progress.history) and progress.history[-1]["step"] == progress.step
    metrics = progress.metrics(progress.step) if evaluated else {}
    metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
    best = evaluated and progress.best_step == progress.step
    _describe(prepared, progress.step, metrics, progress.errors if best else {}, stretches)
    prepared.adapter.write_into(folder)


def _check_savable(prepared: PreparedRun) -> None:
    """Check that the adapter of a run can be saved at its end, with a score of each metric.

    Raises:
        OutputError: the adapter cannot be saved; every reason is listed.
    """
    data = prepared.data
    names = data.task.metric_names(data.evaluation) if data.evaluation else ()
    names = (*names, *(f"{TEST}{name}" for name in names if prepared.rows.test is not None))
    error = ScoreError(len(data.train), 1 / 3, 2 / 3).record()
    _describe(prepared, MOST_STEPS, dict.fromkeys(names, 1 / 3), dict.fromkeys(names, error))
    prepared.adapter.check_savable()
    _describe(prepared, 0, {}, {})


def _save(prepared: PreparedRun, result: loop.TrainingResult, page: RunPage | None) -> RunOutcome:
    """Save the adapter and the report."""
    adapter, recipe, data = prepared.adapter, prepared.recipe, prepared.data
    metrics, (tested, errors, predicted) = result.best or result.last, _tested(prepared)
    scored = prepared.rows.evaluation.examples or data.evaluation
    counted = {name: ScoreError(len(scored)).record() for name in metrics}
    errors = counted | result.errors | {f"{TEST}{name}": each for name, each in errors.items()}
    named = {f"{TEST}{name}": value for name, value in tested.items()}
    _describe(prepared, result.steps, metrics | named, errors, result.stretches)
    folder = Path(recipe.output) / "adapter"
    shared = prepared.options.shard or prepared.options.tensor_parallel
    if is_main() or shared:  # all processes gather sharded tensors
        adapter.save(folder, overwrite=True)
    wait_for_everyone()
    total = sum(p.numel() for p in adapter.parameters())
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    said = verdict(
        result.history,
        result.best_step,
        prepared.options,
        result.metric,
        stopped_early=result.stopped_early,
    )
    if len(result.history) > 1:
        said.append(chosen_note(result.history, len(scored), tested=bool(tested)))
    heads = total - adapter.count()
    outcome = RunOutcome(
        folder,
        metrics,
        result,
        adapter.count(),
        heads,
        size,
        tuple(said),
        tested=tested,
        errors=recorded_errors(errors),
    )
    if page is None:
        return outcome
    said += one_class(page.only_class)
    rows = prepared.rows.evaluation if predicted is None else prepared.rows.test
    if rows is not None:
        page.compare_with_words(data, rows.examples, predicted, result.best_step)
    return replace(outcome, page=page.finish(), verdict=tuple(said), words=page.words)


def drawn_batches(prepared: PreparedRun) -> StreamBatches | None:
    """Return the batches of a run on a stream, starting with the first one."""
    if not isinstance(prepared.train, StreamedRows):
        return None
    data = prepared.data.options
    rank, world = readers(prepared.options.tensor_parallel)
    return StreamBatches(
        prepared.train,
        prepared.options,
        workers=data.workers or 0,
        rank=rank,
        world=world,
        buffer=data.buffer or BUFFER,
    )


def epoch_batches(prepared: PreparedRun, epoch: int) -> BatchList:
    """Return the batches of an epoch; for a stream, the batches from its beginning."""
    if stream := drawn_batches(prepared):
        return stream
    options, encoded, seed = prepared.options, prepared.train, prepared.recipe.seed
    if isinstance(encoded, MixedRows):
        mixing = parse_mixing(prepared.recipe.mixing)
        order = mixed_order(encoded, mixing, options, epoch, seed)
    else:
        size, grouped = options.batch_size, options.length_grouped
        order = batch_order(encoded.lengths, size, epoch, seed, grouped)
    return LazyBatches(order, lambda indices: encoded.batch(indices, epoch))


def begun_epochs(prepared: PreparedRun) -> int:
    """Return the number of epochs that a run begins."""
    options = prepared.options
    if options.max_steps is None:
        return options.epochs
    rows = len(prepared.train.rows)
    per_epoch = steps_per_epoch(rows, options.batch_size, options.gradient_accumulation)
    return -(-options.max_steps // per_epoch)


def first_batches(prepared: PreparedRun) -> Trial:
    """Return the batches for trying a speedup: the first rows, also in a resumed run."""
    evaluation = prepared.evaluation
    few = {} if evaluation is None else evaluation.batch(range(min(8, len(evaluation.rows))))
    training = with_and_without_padding(epoch_batches(prepared, 0)[0])
    return Trial(training, with_and_without_padding(few) if few else ())


_FIRST = 1.0  # estimated seconds of the first page, including the import of matplotlib
_SHARE = 0.05  # maximum share of the run's time for its pages


@dataclass
class LatestPredictions:
    """The predictions of the latest evaluation, of one task or of several tasks in order."""

    task: Task
    data: Encoded
    predictions: list[Prediction] = field(default_factory=list)

    def file(self, step: int) -> PredictionFile | None:
        """Return the predictions file of a step."""
        labels = self.data.setting.labels
        return outcomes_of(self.task, self.data.examples, self.predictions, labels, step)

    def errors(self, metrics: Mapping[str, float]) -> dict[str, ScoreError]:
        """Return the errors of the scores of the latest evaluation."""
        parts, start = dict[str, EvaluatedRows](), 0
        complete = len(self.predictions) == len(self.data.examples)
        for part in self.data.parts:
            end = start + len(part.examples)
            own, labels = self.predictions[start:end], part.setting.labels
            file = outcomes_of(part.task, part.examples, own, labels, 0) if complete else None
            before = f"{part.name}/" if isinstance(part, TaskRows) else ""
            parts[before] = EvaluatedRows(end - start, file)
            start = end
        return score_errors(metrics, parts)


class RunPage(Reporter):
    """Keeps predictions.jsonl at the best evaluation, and report.html up to date.

    The page is rebuilt after an evaluation if all pages together take less than a twentieth of the
    run's time, and always at the end.
    """

    def __init__(
        self, folder: Path, latest: LatestPredictions, note: Callable[[str], None]
    ) -> None:
        self.folder, self.latest, self.note_failure = folder, latest, note
        self.due, self.failed = False, False
        self.only_class: str | None = None
        self.words: WordsComparison | None = None
        self.cost, self.spent = _FIRST, 0.0
        self.began = time.perf_counter()

    def start(self, total: int, done: int) -> None:
        """Delete predictions of a step after the checkpoint; the run will reach it again."""
        path = self.folder / PREDICTIONS
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with open(path, "rb") as file:
                step = json.loads(file.readline(1 << 24))["step"]
            if step > done:
                path.unlink()

    def evaluated(self, line: Evaluated, timing: Timing) -> None:
        """Write the predictions of the best evaluation."""
        self.due = True
        if line.best:
            self._attempt(lambda: self._write_predictions(line.step))

    def flush(self) -> None:
        """Rebuild the page from the files that the other reporters wrote."""
        elapsed = time.perf_counter() - self.began
        if self.due and self.spent + self.cost <= _SHARE * elapsed:
            self._attempt(lambda: write_page(self.folder, live=True))
            self.cost = time.perf_counter() - self.began - elapsed
            self.spent += self.cost
            self.due = False

    def compare_with_words(
        self,
        data: RunData,
        rows: Sequence[Any],
        found: PredictionFile | None,
        best_step: int | None,
    ) -> None:
        """Compare the predictions for some rows with a bag of words, and record the comparison.

        `found` are the predictions; by default, those of the best evaluation in the run folder.
        """

        def compare() -> None:
            kept = found or read_predictions(self.folder)
            if kept is None or (found is None and kept.step != best_step):
                return
            with doing("fitting a bag of words"):
                self.words = compare_with_words(data, rows, kept)
            path = self.folder / BAG_OF_WORDS
            if self.words is None:
                path.unlink(missing_ok=True)
            else:
                replace_file(path, f"{json.dumps(self.words.record())}\n".encode())

        self._attempt(compare)

    def finish(self) -> Path | None:
        """Write the page of the finished run; return its path, or None on failure."""
        page: list[Path] = []
        self._attempt(lambda: page.append(write_page(self.folder)))
        return page[0] if page else None

    def _write_predictions(self, step: int) -> None:
        if file := self.latest.file(step):
            self.only_class = file.only_class
            replace_file(self.folder / PREDICTIONS, file.to_bytes())

    def _attempt(self, action: Callable[[], object]) -> None:
        """Run an action; report a failure as a note, since it must not end the run."""
        try:
            action()
        except Exception as error:
            if not self.failed:
                self.note_failure(f"no report of this run: {type(error).__name__}: {error}")
            self.failed = True


def verdict(
    history: Sequence[Mapping[str, float]],
    best_step: int | None,
    options: RunOptions,
    metric: str,
    *,
    stopped_early: bool,
) -> list[str]:
    """Return sentences about the best evaluation, early stopping, and possible improvements."""
    if best_step is None or not history:
        return []
    best = next(record for record in history if record["step"] == best_step)
    last = history[-1]
    lines = [f"{_place(best, options, last['step'])} ({metric} {best[metric]:.4f})"]
    if stopped_early:
        count = counted(options.patience or 1, "evaluation")
        lines.append(f"stopped early: no improvement in {count}")
    elif best is last and best[metric] not in [record[metric] for record in history[-2:-1]]:
        lines.append(f"the last {_more(options)}")
    return lines


def one_class(label: str | None) -> list[str]:
    """Suggest improvements if the best evaluation predicted the same label for every row."""
    if label is None:
        return []
    return [
        f"every evaluation row is predicted as {one_line(label, 20)!r}; try",
        "another train.learning_rate, more epochs, class_weights=balanced",
    ]


def _place(record: Mapping[str, float], options: RunOptions, last: float) -> str:
    """Name an evaluation by its epoch, or by its step if it is not at the end of one."""
    epoch, step = record["epoch"], record["step"]
    if epoch != round(epoch):
        return f"step {step:,.0f} of {options.max_steps or last:,.0f}, epoch {epoch:.2f}"
    if options.max_steps:
        return f"epoch {epoch:.0f}, step {step:,.0f} of {options.max_steps:,}"
    return f"epoch {epoch:.0f} of {options.epochs}"


def _more(options: RunOptions) -> str:
    """Suggest twice the length of the run."""
    if options.max_steps:
        return f"step was the best: more may help (train.max_steps={2 * options.max_steps})"
    return f"epoch was the best: more may help (train.epochs={2 * options.epochs})"


PROJECT = "adapterhub"


@dataclass(frozen=True)
class TrackedRun:
    """The name and the id of a run in one tracker."""

    name: str
    id: str

    def arguments(self, tracker: str, is_new: bool) -> dict[str, Any]:
        """Return arguments for accelerate's tracker that continue an existing run."""
        if tracker == "wandb":
            project = os.environ.get("WANDB_PROJECT", PROJECT)
            # Its console log would send everything that the program prints.
            settings = {"console": "off", "save_code": False}
            return {"run_name": project, "name": self.name, "id": self.id, "resume": "allow",
                    "settings": settings}  # fmt: skip
        if tracker == "trackio":
            project = os.environ.get("TRACKIO_PROJECT", PROJECT)
            return {"run_name": project, "name": f"{self.name}-{self.id}", "resume": "allow"}
        if tracker == "mlflow":
            named = {"run_name": self.name} if is_new else {"run_id": self.id}
            return {"experiment_name": PROJECT, **named}
        return {"run_name": self.name}


class Tracked(Reporter):
    """Forwards losses and metrics to trackers; one that fails later is dropped with a note."""

    def __init__(
        self, folder: Path, trackers: Mapping[str, Any], ids: Mapping[str, str], console: Reporter
    ) -> None:
        self.folder, self.trackers, self.ids = folder, dict(trackers), ids
        self.console = console

    def start(self, total: int, done: int) -> None:
        """Write the ids of the run, for resuming."""
        with contextlib.suppress(OSError):  # otherwise a resumed run is tracked as a new one
            data = json.dumps(self.ids, indent=1, sort_keys=True)
            replace_file(self.folder / TRACKED, f"{data}\n".encode())

    def trained(self, line: TrainingLine, timing: Timing) -> None:
        """Log loss, learning rates and speed."""
        rates = {f"learning_rate/{name}": rate for name, rate in line.learning_rate.items()}
        speed = {"train/examples_per_second": timing.examples_per_second, "epoch": line.epoch}
        self._log({"train/loss": line.loss, **rates, **speed}, line.step)

    def evaluated(self, line: Evaluated, timing: Timing) -> None:
        """Log the metrics."""
        self._log({f"eval/{name}": value for name, value in line.metrics.items()}, line.step)

    def close(self) -> None:
        """End the run in every tracker."""
        for name in list(self.trackers):
            self._attempt(name, lambda tracker: tracker.finish())
        self.trackers.clear()

    def _log(self, values: Mapping[str, float], step: int) -> None:
        for name in list(self.trackers):
            self._attempt(name, lambda tracker: tracker.log(dict(values), step=step))

    def _attempt(self, name: str, action: Any) -> None:
        try:
            action(self.trackers[name])
        except Exception as error:  # network failures must not end the run
            del self.trackers[name]
            self.console.note(f"{name} gets no more values: {type(error).__name__}: {error}")


def start_trackers(recipe: Recipe, console: Reporter, *, resume: bool) -> Reporter:
    """Start the trackers of a recipe; must be called before anything is written.

    Raises:
        ConfigError: a tracker cannot start.
    """
    names, folder = recipe.train.tracker, Path(recipe.output)
    if not names:
        return Reporter()
    saved = _read_ids(folder / TRACKED) if resume else {}
    trackers, ids = {}, {}
    for name in names:
        run = TrackedRun(folder.resolve().name, saved.get(name) or secrets.token_hex(4))
        trackers[name] = _started(name, run, is_new=name not in saved)
        trackers[name].store_init_configuration(configuration(recipe))
        ids[name] = _id_of(name, trackers[name]) or run.id
    return Tracked(folder, trackers, ids, console)


def _started(name: str, run: TrackedRun, *, is_new: bool) -> Any:
    from accelerate import PartialState, tracking

    # accelerate's trackers write logs, which require its state; `Engine` creates its own state.
    PartialState(cpu=own_device().type == "cpu")
    try:
        tracker = tracking.LOGGER_TYPE_TO_CLASS[name](**run.arguments(name, is_new))
        getattr(tracker, "start", lambda: None)()  # before 1.11, the constructor starts it
    except Exception as error:
        raise ConfigError(
            f"{name} cannot start: {type(error).__name__}: {error}",
            hint=f"log in to {name} or set it offline, or train without train.tracker={name}",
        ) from error
    return tracker


def _id_of(name: str, tracker: Any) -> str | None:
    """Return the id chosen by MLflow; other trackers use our id."""
    return str(tracker.tracker.info.run_id) if name == "mlflow" else None


def _read_ids(path: Path) -> dict[str, str]:
    try:
        ids = json.loads(path.read_bytes())
        return {name: str(value) for name, value in ids.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def configuration(recipe: Recipe) -> dict[str, Any]:
    """Return the options of a recipe by dotted name, without local paths."""
    options = to_dict(recipe)
    for own in (options, *options["tasks"].values()):
        for name in DATA_SOURCES:
            own["data"].pop(name, None)
    del options["output"]
    if is_folder(recipe.backbone):
        options["backbone"] = Path(recipe.backbone).resolve().name
    return dict(_flat(options))


def _flat(options: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            plain = value is None or isinstance(value, bool | int | float | str)
            yield f"{above}{name}", value if plain else json.dumps(value)

"""A training run from its recipe to its files: the conductor of prepare, train, evaluate, save.

    recipe, data   `cli.train`: read and checked before torch is imported
    prepare        backbone, attached adapter, encoded rows; nothing is written
    train          `loop.train`, with the callables of `training_session`
    save           the best tensors, tested, with the record of the run
    page           predictions.jsonl and report.html

The adapters that a run starts from, or trains on top of, are found, verified and recorded. Those
below are active below the new adapter. A method that is built from other adapters, such as
adapterfusion, copies them instead. If predictions or the page cannot be written during the run, a
note is reported.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from adapterhub.adapters.activation import text_positions
from adapterhub.adapters.adapter import STOPS, Adapter
from adapterhub.adapters.attach import attach, empty_copies, free_name
from adapterhub.adapters.route import only_foundations
from adapterhub.backbones.quantized import cpu_note, size_of
from adapterhub.config.options import is_neutral, options_of, to_dict
from adapterhub.data.examples import data_hash
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, OutputError
from adapterhub.files.atomic import replace_file
from adapterhub.files.shown_table import ERRORS, TEST, ScoreError, recorded_errors
from adapterhub.loop import checkpoint, loop
from adapterhub.loop.engine import BatchList, Engine, LazyBatches, batch_order, model_loss
from adapterhub.loop.loop import DATA, STRETCHES, RunProgress
from adapterhub.loop.processes import (
    divided_evaluation,
    from_main,
    is_main,
    readers,
    wait_for_everyone,
)
from adapterhub.loop.report import (
    Evaluated,
    Reporter,
    Several,
    Timing,
    one_class,
    reporter_for,
    start_trackers,
    verdict,
)
from adapterhub.loop.sharding import shard
from adapterhub.loop.speedups import Speedups, Trial, with_and_without_padding
from adapterhub.loop.trainee import (
    AdapterTrainee,
    check_plateaus,
    epochs_needed,
    unfreeze_all,
    unreached,
)
from adapterhub.merging.combine import UpdateRanks, update_ranks
from adapterhub.methods.common.base import dump_methods, parse_methods
from adapterhub.pages.evaluation import (
    LatestPredictions,
    evaluate_off_and_on,
    evaluate_rows,
    with_evaluation_reference,
)
from adapterhub.pages.page import (
    BAG_OF_WORDS,
    RETAINED,
    RetainedScore,
    WordsComparison,
    chosen_note,
    read_run,
    write_page,
)
from adapterhub.pages.row_scores import (
    PREDICTIONS,
    PredictionFile,
    read_predictions,
    row_scores,
)
from adapterhub.recipe.output_folder import RECIPE, SCHEMA, hold_output, writing
from adapterhub.recipe.recipe import (
    DATA_SOURCES,
    SCHEMA_LINE,
    Recipe,
    RunOptions,
    dump_mixing,
    parse_mixing,
    read,
    run_options,
    schema_bytes,
    steps_per_epoch,
)
from adapterhub.speed.compiled_layers import check_installed, compiled_layers, liger_kernels
from adapterhub.speed.frozen_cache import KeptActivations, RecordedRun, frozen_layers
from adapterhub.speed.head_loss import WRITES_TEXT, choose_head_loss
from adapterhub.status import doing
from adapterhub.tasks import Encoded, Setting, dump_task, parse_task
from adapterhub.tasks.common.batches import Loss, corrected_loss
from adapterhub.tasks.common.distillation import DIVERGENCE
from adapterhub.tasks.common.infer_task import DEFAULT
from adapterhub.training.calibration import STARTS, calibrate_run
from adapterhub.training.loading import (
    BackboneLoader,
    FittedRows,
    KernelChoice,
    Loaded,
    RunOrigins,
    check_one_model,
    choose_kernels,
    enter_tasks,
    kernels_of,
    mix_rows,
    run_origins,
)
from adapterhub.training.run_data import RunData, check_attached, check_recipe, metric_names
from adapterhub.training.sources import SourcedRows, SourceRows, drawn_rows, source_shares
from adapterhub.training.stream import BUFFER, MixedStream, StreamBatches, StreamedRows
from adapterhub.training.task_mixture import MixedRows, mixed_order
from adapterhub.training.teacher import (
    Distillation,
    Teacher,
    bring_teacher,
    distill,
    find_teacher,
)
from adapterhub.training.word_baseline import compare_with_words

MOST_STEPS = 10**9  # per run: its record is checked before it begins


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run: the adapter's folder, metrics and sizes, a verdict and the report.

    `words` compares the run with a bag of words, if that is a baseline of the task. `tested`
    contains the metrics of the test rows. `errors` contains the error of each metric; metrics in
    `tested` are called "test/NAME" there. `ranks` is of the update of a language model, if it is
    low-rank. `retained` compares the backbone with the adapter off and on, on the rows of
    `data.retain`. `sources` are the several sources of the training rows, with their shares; their
    metrics are called "SOURCE/NAME".
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
    ranks: UpdateRanks | None = None
    retained: RetainedScore | None = None
    sources: tuple[tuple[SourceRows, float], ...] = ()

    @property
    def word_lines(self) -> tuple[str, ...]:
        """The lines that compare the run with a bag of words."""
        return self.words.lines if self.words else ()

    def losses(self) -> list[float]:
        """Read the training losses of the run, in order."""
        losses = [line["loss"] for line in read_run(self.folder.parent).training]
        return [loss for loss in losses if loss is not None]


def run(
    recipe: Recipe,
    reporter: Reporter | None = None,
    *,
    quiet: bool = False,
    resume: bool = False,
    data: RunData | None = None,
    loader: BackboneLoader | None = None,
    ended: Callable[[PreparedRun, RunOutcome], None] | None = None,
) -> RunOutcome:
    """Train, evaluate and save.

    The output folder gets `adapter/` (the files to publish), `recipe.yaml` with its schema for
    editors, `metrics.jsonl`, `timings.jsonl`, `checkpoints/`, and `report.html` with its data,
    `predictions.jsonl` and `bag_of_words.json`. With several processes, the first one writes them.
    `ended` is called while the model still has the adapter with its best tensors. The default
    reporter shows progress in the terminal, unless `quiet`, and writes the files.

    Raises:
        AdapterhubError: of any type; the folder is neither created nor changed unless training
            could start.
    """
    loader, checked = loader or BackboneLoader(), check_recipe(recipe, resume)
    reporter = reporter or reporter_for(Path(recipe.output), recipe.train, quiet=quiet)
    prepared = prepare(checked, data, kernels_of(recipe) if resume else None, loader)
    try:
        rows = prepared.rows.evaluation
        latest = LatestPredictions(prepared.data.task, rows) if is_main() else None
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
    if path.exists() and not _has_checkpoint(recipe):
        raise OutputError(
            f"{path} is another recipe, and there is no checkpoint to resume from",
            expected="the recipe that the run was started with",
            hint=f"delete {path} to train again in this folder, or another --output",
        )
    with writing(path):
        replace_file(path, (SCHEMA_LINE + recipe.to_yaml()).encode())
    with suppress(OSError):  # only editors read it
        replace_file(output / SCHEMA, schema_bytes())


def _has_checkpoint(recipe: Recipe) -> bool:
    return checkpoint.exists(checkpoint.folder_of(Path(recipe.output), "last"))


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
    recipe, data, rows = prepared.recipe, prepared.data, prepared.evaluation
    _check_savable(prepared)
    for note in prepared.notes:
        reporter.note(note)
    for warning in unreached(prepared.adapter, begun_epochs(prepared)):
        reporter.note(warning)

    if slow := cpu_note(prepared.adapter.backbone):
        reporter.note(f"note: {slow}")

    trainee, loss = AdapterTrainee(prepared.adapter), prepared.own_loss or model_loss
    init = prepared.options.init
    if init and (STARTS[init].allots or not (resume and _has_checkpoint(recipe))):
        first, recomputed = epoch_batches(prepared, 0), prepared.options.gradient_checkpointing
        calibration = calibrate_run(prepared.adapter, first, init, loss, checkpointing=recomputed)
        reporter.note(str(calibration))
    stream, items = drawn_batches(prepared), data.task.loss_items(prepared.train)
    divided = prepared.options.shard or prepared.options.tensor_parallel
    steps = data.task.passes, data.task.on_policy
    engine, taught = Engine(trainee, prepared.options, loss, items, *steps), prepared.distillation
    if taught is not None:
        engine.below_head = partial(taught.loss, engine)

    def batches(epoch: int) -> BatchList:
        own = stream or epoch_batches(prepared, epoch)
        return own if taught is None else taught.batches(own, prepared.train, epoch)

    return loop.TrainingSession(
        engine,
        batches,
        None if rows is None else partial(_evaluate, prepared, rows, latest),
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
    taught, row = prepared.distillation is not None, partial(prepared.train.batch, [0])
    own = bool(prepared.own_loss or data.parts or taught)
    trial = partial(first_batches, prepared)
    chosen = (
        None
        if own or data.task.head not in WRITES_TEXT
        else choose_head_loss(adapter, data.task, options, row),
        None if taught else frozen_layers(adapter, options, prepared.recorded, note),
        liger_kernels(adapter, options, trial, note),
        compiled_layers(adapter, options, trial, note),
    )
    return Speedups([each for each in chosen if each is not None], note)


def _evaluate(
    prepared: PreparedRun, rows: Encoded, latest: LatestPredictions | None
) -> dict[str, float]:
    options, record = prepared.options, latest.predictions if latest else None
    if record is not None:
        record.clear()
    elif isinstance(rows, SourcedRows):  # in all processes, which evaluate together
        record = []
    with _divided(prepared):
        size = options.eval_batch_size
        metrics = prepared.data.task.evaluate(prepared.model, rows, size, record)
        if isinstance(rows, SourcedRows):
            metrics = metrics | rows.source_scores(prepared.model, size, record or [], metrics)
        return metrics | _divergence(prepared, rows)


def _divided(prepared: PreparedRun) -> AbstractContextManager[None]:
    """Divide the batches of an evaluation over the processes of the run."""
    options = prepared.options
    return divided_evaluation(sharded=bool(options.shard), together=options.tensor_parallel)


def _divergence(prepared: PreparedRun, rows: Encoded) -> dict[str, float]:
    """Return the divergence of rows from the teacher, if there is one."""
    if (taught := prepared.distillation) is None:
        return {}
    return {DIVERGENCE: taught.divergence(rows, prepared.options.eval_batch_size)}


def _tested(
    prepared: PreparedRun,
) -> tuple[dict[str, float], dict[str, dict[str, float]], PredictionFile | None]:
    """Evaluate the best tensors on the test rows: metrics, their errors, and predictions."""
    rows, size = prepared.rows.test, prepared.options.eval_batch_size
    if rows is None:
        return {}, {}, None
    testing = doing(f"testing on {len(prepared.data.test):,} rows")
    with torch.no_grad(), testing, _divided(prepared):
        evaluation = evaluate_rows(prepared.model, rows, size)
        metrics = from_main(evaluation.metrics | _divergence(prepared, rows))
    metrics = {name: float(value) for name, value in metrics.items()}
    return metrics, {name: e.record() for name, e in evaluation.errors.items()}, evaluation.outcomes


def _retained(prepared: PreparedRun) -> RetainedScore | None:
    """Score the best tensors on the rows of `data.retain`, with the adapter off and on.

    Without such rows, tasks that generate while they train are scored on the evaluation rows.
    """
    data, model, size = prepared.data, prepared.model, prepared.options.eval_batch_size
    examples = data.retain or (data.evaluation if data.task.on_policy else ())
    if not examples:
        return None
    rows = data.task.encode(examples, prepared.rows.evaluation.setting, labelled=True)
    with torch.no_grad():
        rows = with_evaluation_reference(model, rows, size)
        with _divided(prepared):
            off, on = (each.outcomes for each in evaluate_off_and_on(model, rows, size))
    if off is None or on is None:
        return None
    # The loss shows what is forgotten long before generated answers do.
    own = data.task.main_metric if data.task.on_policy else ""
    return RetainedScore.between(off, on, "loss" if "loss" in row_scores(off.kind) else own)


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
        **_weights(prepared.data),
        **prepared.teacher_record,
    }


def _weights(data: RunData) -> dict[str, dict[str, float]]:
    """Return the weights of several sources, which a resumed run must keep."""
    weights = {source.name: source.weight for source in data.sources}
    return {"sources": weights} if weights else {}


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
    if recipe.tasks or recipe.data.several:
        usual = "equal" if recipe.data.stream else None
        mixing = usual if recipe.mixing is None else recipe.mixing
        fields["mixing"] = dump_mixing(parse_mixing(mixing))
    else:
        del fields["mixing"]
    mixed = fields.pop("tasks")
    if recipe.tasks:
        fields["tasks"] = {n: own | {"data": _portable(own["data"])} for n, own in mixed.items()}
    if recipe.name is None:  # a folder's value, since the folder may be moved
        del fields["name"]
    if recipe.family is None:
        del fields["family"]
    if recipe.attention is None:
        del fields["attention"]
    if "teacher" in fields:  # its record has its name
        del fields["teacher"]["model"]
    return {
        k: v for k, v in fields.items() if k not in ("output", "train", "backbone", "from", "on")
    }


def _portable(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data options that change a result, without local paths."""
    usual = {each.name: each.default for each in options_of(DataOptions)}
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
        **prepared.teacher_record,
        **_stops(prepared),
        "backbone_parameters": prepared.backbone_parameters,
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
    names = metric_names(data, prepared.recipe) if data.evaluation else ()
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
    sentences = verdict(
        result.history,
        result.best_step,
        prepared.options,
        result.metric,
        stopped_early=result.stopped_early,
    )
    if len(result.history) > 1:
        sentences.append(chosen_note(result.history, len(scored), tested=bool(tested)))
    heads = total - adapter.count()
    retained = _retained(prepared)
    writes = adapter.backbone.output_embedding is not None
    outcome = RunOutcome(
        folder,
        metrics,
        result,
        adapter.count(),
        heads,
        size,
        tuple(sentences),
        tested=tested,
        errors=recorded_errors(errors),
        ranks=None if shared or not writes else update_ranks(adapter),
        retained=retained,
        sources=tuple((each, shares_of(prepared)[each.name]) for each in data.sources),
    )
    if retained is not None and is_main():
        path = Path(recipe.output) / RETAINED
        replace_file(path, f"{json.dumps(retained.record())}\n".encode())
    if page is None:
        return outcome
    sentences += one_class(page.only_class)
    rows = prepared.rows.evaluation if predicted is None else prepared.rows.test
    if rows is not None:
        page.compare_with_words(data, rows.examples, predicted, result.best_step)
    return replace(outcome, page=page.finish(), verdict=tuple(sentences), words=page.words)


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
        size, grouped, lengths = options.batch_size, options.length_grouped, encoded.lengths
        drawn: Sequence[int] = range(len(lengths))
        if isinstance(encoded, SourcedRows):
            shares = [*shares_of(prepared).values()]
            drawn = drawn_rows(encoded.rows_of, shares, epoch, seed)
            lengths = [lengths[index] for index in drawn]
        order = batch_order(lengths, size, epoch, seed, grouped)
        order = [[drawn[index] for index in batch] for batch in order]
    if not encoded.task.on_policy:
        return LazyBatches(order, lambda indices: encoded.batch(indices, epoch))
    task, model, bare = encoded.task, prepared.model, partial(only_foundations, prepared.model)
    return LazyBatches(order, lambda indices: task.rollout(model, encoded, indices, epoch, bare))


def shares_of(prepared: PreparedRun) -> dict[str, float]:
    """Return the share of each of several sources in the drawn rows; {} for one source."""
    train, sources = prepared.train, prepared.data.sources
    if isinstance(train, SourcedRows):
        weights = {source.name: source.weight for source in sources}
        return source_shares(parse_mixing(prepared.recipe.mixing), train.sizes, weights)
    if isinstance(train, StreamedRows) and isinstance(train.stream, MixedStream):
        return dict(zip((source.name for source in sources), train.stream.shares, strict=True))
    return {}


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
        predictions: PredictionFile | None,
        best_step: int | None,
    ) -> None:
        """Compare the predictions for some rows with a bag of words, and record the comparison.

        Without `predictions`, those of the best evaluation are compared.
        """

        def compare() -> None:
            kept = predictions or read_predictions(self.folder)
            if kept is None or (predictions is None and kept.step != best_step):
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


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start; nothing has been written yet.

    `notes` are for the user to read before it starts. `activations` are cached outputs of frozen
    layers.
    """

    recipe: Recipe
    data: RunData
    adapter: Adapter
    rows: FittedRows
    notes: tuple[str, ...]
    activations: KeptActivations
    origins: RunOrigins
    distillation: Distillation | None = None

    @property
    def model(self) -> Any:
        """The backbone, with the adapter attached."""
        return self.adapter.model

    @property
    def train(self) -> Encoded:
        """The training rows."""
        return self.rows.train

    @property
    def evaluation(self) -> Encoded | None:
        """The evaluation rows; None without evaluation."""
        return self.rows.evaluation if self.data.evaluation else None

    @property
    def recorded(self) -> RecordedRun:
        """The inputs for recording frozen layers in this run."""
        streams, seed = self.data.streams, self.recipe.seed
        return RecordedRun(self.train, self.evaluation, streams, seed, self.activations)

    @property
    def teacher_record(self) -> dict[str, Any]:
        """The record of the teacher, if there is one."""
        return {"teacher": self.distillation.teacher.record} if self.distillation else {}

    @cached_property
    def digests(self) -> dict[str, str]:
        """The digests of the training rows, and of the evaluation rows."""
        return {"train": data_hash(self.data.train), "evaluation": data_hash(self.data.evaluation)}

    @cached_property
    def data_record(self) -> dict[str, Any]:
        """The adapter's record of its rows; scores on the same rows have the same digest."""
        data, digests = self.data, self.digests
        record = {
            "sha256": hashlib.sha256("".join(digests.values()).encode()).hexdigest(),
            "train": len(data.train),
            "eval": len(data.evaluation),
            "eval_sha256": digests["evaluation"],
        }
        if self.rows.test is not None:
            record |= {"test": len(data.test), "test_sha256": data_hash(data.test)}
        if data.sources:
            record["sources"] = self._source_records()
        return record

    def _source_records(self) -> list[dict[str, Any]]:
        """Return the record of each source: its name, rows, weight and share."""
        shares = shares_of(self)
        return [
            {
                "name": source.name,
                **({"train": source.train} if source.train else {}),
                "eval": source.evaluation,
                "weight": source.weight,
                "share": round(shares[source.name], 6),
            }
            for source in self.data.sources
        ]

    @cached_property
    def backbone_parameters(self) -> int:
        """The number of parameters of the backbone."""
        return sum(map(size_of, self.adapter.anatomy.parameters().values()))

    @cached_property
    def own_loss(self) -> Loss | None:
        """The function that computes the loss, or None for the model's loss. It runs the model."""
        task = self.data.task
        return task.loss(self.train) or corrected_loss(self.model, task.head)

    @property
    def options(self) -> RunOptions:
        """The complete options of the run."""
        assert isinstance(self.recipe.train, RunOptions)
        return self.recipe.train


def prepare(
    recipe: Recipe,
    data: RunData | None = None,
    kernels: KernelChoice | None = None,
    loader: BackboneLoader | None = None,
) -> PreparedRun:
    """Load the backbone, attach the adapter and encode; write nothing.

    Data and kernels that are not passed in are read and chosen here.
    """
    check_installed(recipe.train)
    loader = loader or BackboneLoader()
    data = data or loader.data(recipe)
    recipe = data.completed(recipe)
    origins, methods = run_origins(recipe)
    start = origins.start
    if data.parts:
        check_one_model(data)
    first = next(iter(data.parts.values()), data)
    loaded = loader.backbone(recipe, data, kernels or choose_kernels(recipe, first, methods))
    model, kernels = loaded.model, loaded.kernels
    data = data.for_model(model)
    below = origins.attach(model)
    teacher = _teacher(recipe, loaded, data)
    name = recipe.name or free_name(recipe.adapter_name, below)
    with empty_copies(bool(recipe.train.shard) and start is None):
        adapter = attach(model, methods, name=name, on=below, partial=recipe.partial)
    started = start.give(adapter) if start else ""
    check_attached(data, adapter)
    check_plateaus(adapter, evaluated=bool(data.evaluation))
    adapter.metadata.task = data.task.name
    rows = _rows(recipe, data, loader, adapter, loaded)
    batch_size = recipe.train.batch_size or data.batch_size
    options = replace(recipe.train, max_length=rows.max_length, batch_size=batch_size)
    options = run_options(options, methods, len(rows.train.rows), epochs_needed(adapter))
    options = _with_init(options, recipe, started=start is not None)
    recipe = replace(
        recipe,
        dtype=kernels.dtype,
        attention=kernels.attention,
        train=options,
        **data.complete_options(recipe),
        method=recipe.method if recipe.method is not None else list(dump_methods(methods)),
    )
    notes = (
        *data.chosen,
        *data.notes,
        *data.notes_on_scores(),
        *rows.notes,
        *filter(None, (kernels.note, started)),
        *origins.notes(),
        *([teacher.note] if teacher else []),
    )
    rows = _with_shards(rows, adapter, options, started=start is not None)
    taught = None if teacher is None else distill(recipe.teacher, teacher, adapter, rows.train)
    return PreparedRun(recipe, data, adapter, rows, notes, loaded.activations, origins, taught)


def _teacher(recipe: Recipe, loaded: Loaded, data: RunData) -> Teacher | None:
    """Attach or load the teacher that a recipe names, before the new adapter is attached."""
    if recipe.teacher.model is None:
        return None
    teacher = find_teacher(recipe)
    return bring_teacher(teacher, recipe, loaded.model, loaded.processor, data.task, data.labels)


def _rows(
    recipe: Recipe,
    data: RunData,
    loader: BackboneLoader,
    adapter: Adapter,
    loaded: Loaded,
) -> FittedRows:
    """Encode the examples; with several tasks, first give the adapter a head for each."""
    reads = text_positions(adapter.model, [adapter])
    setting = Setting(loaded.processor, reads, adapter.labels, recipe.seed, reads)
    trained = loaded.trained_length
    some = () if data.streams else data.train
    with doing(f"encoding {len(some) + len(data.evaluation) + len(data.test):,} examples"):
        if not data.parts:
            return loader.rows(data, setting, recipe.train.max_length, trained)
        rows = {
            name: loader.rows(
                part, replace(setting, labels=part.labels), recipe.train.max_length, trained
            )
            for name, part in data.parts.items()
        }
    return mix_rows(rows, data.task, enter_tasks(adapter, data, recipe.seed))


def _with_shards(
    rows: FittedRows, adapter: Adapter, options: RunOptions, *, started: bool
) -> FittedRows:
    """Shard the model if the options require it, and return the rows with their reference.

    The sharded model computes the reference, unless the adapter replaces parts of the backbone.
    Such parts cannot be exchanged after sharding.
    """
    sharded_first = bool(options.shard) and not adapter.replaces
    if not sharded_first:
        rows = _with_reference(rows, adapter, options, started=started, sharded=False)
    if options.shard:
        shard(adapter)
    if sharded_first:
        rows = _with_reference(rows, adapter, options, started=started, sharded=True)
    return rows


def _with_reference(
    rows: FittedRows, adapter: Adapter, options: RunOptions, *, started: bool, sharded: bool
) -> FittedRows:
    """Return rows with their reference, if their task uses one.

    The reference is computed by the model with the new adapter off and those below it on. If the
    adapter was started from another one, the model with that adapter computes it. A resumed run
    computes it again, before the tensors of its checkpoint are loaded.
    """
    model: Any = adapter.model
    task, size = rows.train.task, options.eval_batch_size
    if not task.compares_with_reference:
        return rows
    parts = (rows.train, rows.evaluation, rows.test)
    off = nullcontext() if started else only_foundations(model)
    divided = divided_evaluation(sharded=sharded, together=options.tensor_parallel)
    with off, doing("computing the reference"), divided:
        train, evaluation, test = (
            task.with_reference(model, part, size) if part and part.rows and reads else part
            for part, reads in zip(parts, (True, *[task.evaluates_with_reference] * 2), strict=True)
        )
    assert train is not None
    assert evaluation is not None
    return replace(rows, train=train, evaluation=evaluation, test=test)


def _with_init(options: RunOptions, recipe: Recipe, *, started: bool) -> RunOptions:
    """Return the options without a data-based initialization if another adapter is the start.

    Raises:
        ConfigError: the recipe names both, or such an initialization of a sharded model.
    """
    if started and recipe.train.init:
        raise ConfigError(
            f"the run would start from {recipe.from_} and from train.init={recipe.train.init}",
            hint="one of both",
        )
    return replace(options, init=None) if started else options

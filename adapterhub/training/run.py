"""A training run from its recipe to its files: prepare, train, save. Several share a backbone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adapterhub.adapters.adapter import STOPS
from adapterhub.backbones.quantized import cpu_note, size_of
from adapterhub.config.options import is_neutral, to_dict
from adapterhub.data.options import DataOptions
from adapterhub.errors import AdapterhubError, ConfigError, OutputError
from adapterhub.files.atomic import replace_file
from adapterhub.files.shown_table import ERRORS, TEST, ScoreError, recorded_errors
from adapterhub.loop import checkpoint, loop
from adapterhub.loop.engine import BatchList, Engine, LazyBatches, batch_order, model_loss
from adapterhub.loop.processes import (
    Stopped,
    catch_stop_signals,
    divided_evaluation,
    from_main,
    is_main,
    readers,
    wait_for_everyone,
)
from adapterhub.loop.progress import DATA, STRETCHES, RunProgress
from adapterhub.loop.report import Reporter, Several
from adapterhub.loop.speedups import Speedups, Trial, with_and_without_padding
from adapterhub.loop.trainee import AdapterTrainee, unfreeze_all, unreached
from adapterhub.methods.common.spec import dump_methods, parse_methods
from adapterhub.pages.page import chosen_note
from adapterhub.pages.predictions import PredictionFile
from adapterhub.pages.run_files import WordsComparison
from adapterhub.recipe.options import dump_mixing, parse_mixing, steps_per_epoch
from adapterhub.recipe.output_folder import RECIPE, hold_output, writing
from adapterhub.recipe.recipe import DATA_SOURCES, SCHEMA_LINE, Recipe, read, write_schema
from adapterhub.speed.compiled_layers import compiled_layers
from adapterhub.speed.frozen_cache import frozen_layers
from adapterhub.speed.head_loss import choose_head_loss
from adapterhub.speed.liger import liger_kernels
from adapterhub.status import doing
from adapterhub.tasks import Encoded, dump_task, parse_task
from adapterhub.tasks._by_data import DEFAULT
from adapterhub.training.calibration import STARTS, calibrate_run
from adapterhub.training.loading import BackboneLoader, KernelChoice, SharedLoader
from adapterhub.training.prepare import PreparedRun, prepare
from adapterhub.training.run_data import RunData, check_recipe
from adapterhub.training.run_reports import (
    LatestPredictions,
    RunPage,
    one_class,
    start_trackers,
    verdict,
)
from adapterhub.training.stream import BUFFER, StreamBatches, StreamedRows
from adapterhub.training.task_mixture import MixedRows, mixed_order

MOST_STEPS = 10**9  # of a run, as its record is checked before it begins


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run: the adapter's folder, metrics and sizes, a verdict and the report.

    `words` compares it with a bag of words, where that is a baseline of the task. `tested` has the
    metrics of the test rows, and `errors` how sure each metric is: there those of `tested` are
    called "test/NAME".
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
    editors, `metrics.jsonl`, `timings.jsonl`, `checkpoints/`, and `report.html` with what it shows,
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
    """A run of several that has ended: with its outcome, or with an error."""

    recipe: Recipe
    outcome: RunOutcome | None = None
    error: AdapterhubError | None = None


def run_several(
    recipes: Sequence[Recipe], reporter: Callable[[Recipe], Reporter], *, resume: bool = False
) -> Iterator[Ended]:
    """Train one recipe after the other; what they share is loaded, read and computed once.

    The backbone, the data and the encoded rows are shared, and so are the outputs of frozen layers
    (`train.frozen_cache`). Each run has an output folder of its own, ends with the same bytes as
    alone, and is continued if it had begun and `resume` says so. One that fails is yielded with its
    error, and the next one begins. A note is given once.

    Yields:
        Each run when it has ended.

    Raises:
        Stopped: a signal stopped the current run, after its state was saved.
    """
    loader, said = SharedLoader(), set[str]()
    with catch_stop_signals() as stop:
        for done, recipe in enumerate(recipes):
            if stop.requested:  # at the end of the run before, which it did not stop
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
    """Forwards a note that an earlier run has given to nobody."""

    def __init__(self, reporters: list[Reporter], said: set[str]) -> None:
        super().__init__(reporters)
        self.said = said

    def note(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            super().note(text)


def _latest(prepared: PreparedRun) -> LatestPredictions | None:
    """Return where the first process keeps the predictions of the latest evaluation."""
    return LatestPredictions(prepared.data.task, prepared.rows.evaluation) if is_main() else None


def _reports(
    prepared: PreparedRun, reporter: Reporter, resume: bool, latest: LatestPredictions | None
) -> tuple[Reporter, RunPage | None]:
    """Return a reporter that trackers share, and the writer of the report, unless it is turned off.

    Both are of the first process.
    """
    if latest is None:
        return reporter, None
    recipe = prepared.recipe
    reporter = Several([reporter, start_trackers(recipe, reporter, resume=resume)])
    if not recipe.train.report:
        return reporter, None
    return reporter, RunPage(Path(recipe.output), latest, reporter.note)


def _kernels_of(recipe: Recipe) -> KernelChoice | None:
    """Return the kernels that a run to resume was started with, if it was started."""
    path = Path(recipe.output) / RECIPE
    if not path.exists():
        return None
    try:
        started = read(path)
    except ConfigError:
        return None
    return KernelChoice(recipe.dtype or started.dtype, recipe.attention or started.attention)


def _write_recipe(recipe: Recipe, prepared: PreparedRun) -> None:
    """Write a recipe in the first process, with its kernels, unless the file says the same already.

    It is the recipe as given, without what follows from the data.

    Raises:
        OutputError: there is another recipe and no checkpoint, or the folder cannot be written.
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
            hint=f"delete {path} to train anew in this folder, or another --output",
        )
    with writing(path):
        replace_file(path, (SCHEMA_LINE + recipe.to_yaml()).encode())
    with suppress(OSError):  # only editors read it
        write_schema(output)


def _is_recipe(path: Path, recipe: Recipe) -> bool:
    """Return whether a file has this recipe; the folder may have been moved."""
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
    """Return the session of a prepared run; notes for the user are reported.

    `checked` is called when all checks have passed, before anything is written.
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
    """Return what is recorded of how sure the scores of the latest evaluation are."""
    errors = latest.errors(metrics) if latest else {}
    return {name: error.record() for name, error in errors.items()}


def _speedups(prepared: PreparedRun, note: Callable[[str], None]) -> Speedups:
    """Return the speedups that may be used in a run, in the order in which they are."""
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
    """Return what evaluates a run, and keeps its predictions for the report; None: no rows."""
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
    """Evaluate the best tensors on the test rows: the metrics, their errors, what is predicted."""
    rows = prepared.rows.test
    if rows is None:
        return {}, {}, None
    latest = LatestPredictions(prepared.data.task, rows)
    with torch.no_grad(), doing(f"testing on {len(prepared.data.test):,} rows"):
        metrics = from_main(_evaluate(prepared, rows, latest))
    metrics = {name: float(value) for name, value in metrics.items()}
    return metrics, _error_records(latest, metrics), latest.file(0)


def _record(prepared: PreparedRun) -> dict[str, Any]:
    """Return what a checkpoint records of a run: one of another run is not continued."""
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
    """Return the tokens behind a learned text, if the backbone does not stop at them itself."""
    stops = prepared.data.task.stops(prepared.train.setting)
    new = prepared.adapter.state.new_stops(stops)
    return {STOPS: new} if new else {}


def _identity(recipe: Recipe) -> dict[str, Any]:
    """Return the part of the recipe that determines the adapter's bytes: no paths of a machine."""
    fields = to_dict(recipe) | {
        "method": list(dump_methods(parse_methods(recipe.method))),  # type: ignore[arg-type]
        "task": dump_task(parse_task(recipe.task or DEFAULT)),  # of several tasks, each has its own
    }
    # Older versions refuse options that they lack, also with a value that changes nothing.
    fields["data"] = _portable(fields["data"])
    if recipe.tasks:
        mixed = fields.pop("tasks")
        fields["tasks"] = {n: own | {"data": _portable(own["data"])} for n, own in mixed.items()}
        fields["mixing"] = dump_mixing(parse_mixing(recipe.mixing))
    else:
        del fields["tasks"], fields["mixing"]
    if recipe.name is None:  # that of a folder, which may be moved
        del fields["name"]
    if recipe.family is None:
        del fields["family"]
    if recipe.attention is None:
        del fields["attention"]
    return {
        k: v for k, v in fields.items() if k not in ("output", "train", "backbone", "from", "on")
    }


def _portable(data: dict[str, Any]) -> dict[str, Any]:
    """Return the options of data that change a result, without paths of a machine."""
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
    """Give the adapter the record of its run after so many steps, with metrics and their errors."""
    adapter, recipe = prepared.adapter, prepared.recipe
    adapter.metadata.metrics = dict(metrics)
    # A method built from trained adapters records their names, not the folders they came from.
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
    """Write the folder of the adapter as it is after a step, with the metrics of that step."""
    evaluated = bool(progress.history) and progress.history[-1]["step"] == progress.step
    metrics = progress.metrics(progress.step) if evaluated else {}
    metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
    best = evaluated and progress.best_step == progress.step
    _describe(prepared, progress.step, metrics, progress.errors if best else {}, stretches)
    prepared.adapter.write_into(folder)


def _check_savable(prepared: PreparedRun) -> None:
    """Check that the adapter of a run can be saved at its end, with a score of each metric.

    Raises:
        OutputError: it cannot; every reason is listed.
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
    if is_main() or shared:  # all processes gather what is sharded
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
    """Return the batches of a run whose rows are streamed, from the first one on."""
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
    """Return the batches of an epoch; of a stream, those from its beginning on."""
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
    """Return how many epochs a run begins."""
    options = prepared.options
    if options.max_steps is None:
        return options.epochs
    rows = len(prepared.train.rows)
    per_epoch = steps_per_epoch(rows, options.batch_size, options.gradient_accumulation)
    return -(-options.max_steps // per_epoch)


def first_batches(prepared: PreparedRun) -> Trial:
    """Return what a speedup is tried on: the first rows, also in a resumed run."""
    evaluation = prepared.evaluation
    few = {} if evaluation is None else evaluation.batch(range(min(8, len(evaluation.rows))))
    training = with_and_without_padding(epoch_batches(prepared, 0)[0])
    return Trial(training, with_and_without_padding(few) if few else ())

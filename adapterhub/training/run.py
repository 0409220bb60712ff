"""A training run from its recipe to its files: prepare, train, save."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from adapterhub.adapters.adapter import STOPS
from adapterhub.backbones.quantized import cpu_note
from adapterhub.backbones.quantized_layers import size_of
from adapterhub.config.options import is_neutral, to_dict
from adapterhub.data.examples import data_hash
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, OutputError
from adapterhub.files.atomic import replace_file
from adapterhub.loop import checkpoint, loop, stages
from adapterhub.loop.batching import BatchList, LazyBatches, batch_order
from adapterhub.loop.engine import Engine, model_loss
from adapterhub.loop.evaluation import divided_evaluation
from adapterhub.loop.processes import is_main, readers, wait_for_everyone
from adapterhub.loop.report import Reporter, Several
from adapterhub.loop.speedups import Speedups, Trial, with_and_without_padding
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.methods._spec import dump_methods, parse_methods
from adapterhub.recipe.defaults import steps_per_epoch
from adapterhub.recipe.mixing import dump_mixing, parse_mixing
from adapterhub.recipe.output_folder import RECIPE, check_output, hold_output, writing
from adapterhub.recipe.recipe import DATA_SOURCES, Recipe, read
from adapterhub.recipe.recipe_schema import SCHEMA_LINE, write_schema
from adapterhub.speed.compiled_layers import compiled_layers
from adapterhub.speed.frozen_cache import frozen_layers
from adapterhub.speed.head_loss import choose_head_loss
from adapterhub.speed.liger import liger_kernels
from adapterhub.tasks import dump_task, parse_task
from adapterhub.training.example_stream import BUFFER
from adapterhub.training.kernels import KernelChoice
from adapterhub.training.loading import BackboneLoader
from adapterhub.training.mixture import mixed_order
from adapterhub.training.preflight import check_trackers, placed
from adapterhub.training.prepare import PreparedRun, prepare
from adapterhub.training.run_data import RunData
from adapterhub.training.run_page import LatestPredictions, RunPage, one_class, verdict
from adapterhub.training.stream_batches import StreamBatches, StreamedRows
from adapterhub.training.task_mixture import MixedRows
from adapterhub.training.trackers import start_trackers


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run: the adapter's folder, metrics and sizes, a verdict and the report."""

    folder: Path
    metrics: dict[str, float]
    result: loop.TrainingResult
    parameters: int
    head_parameters: int
    adapter_bytes: int
    verdict: tuple[str, ...] = ()
    page: Path | None = None


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
    editors, `metrics.jsonl`, `timings.jsonl`, `predictions.jsonl`, `report.html` and
    `checkpoints/`. With several processes, the first one writes them.

    Args:
        recipe: the recipe.
        reporter: where progress is reported.
        resume: continue the run in the output folder, if there is one.
        data: the data of the recipe, if it has been read already.
        loader: loads the backbone; a `SharedLoader` loads it once for several runs.
        ended: called at the end, while the model still has the adapter with its best tensors.

    Raises:
        AdapterhubError: of any type; the folder is neither created nor changed unless training
            could start.
    """
    loader = loader or BackboneLoader()
    prepared = _prepare_run(recipe, resume, data, loader)
    try:
        outcome = _train_and_save(prepared, recipe, reporter, resume)
        if ended is not None:
            ended(prepared, outcome)
        return outcome
    finally:
        loader.release(prepared.model)


def _prepare_run(
    recipe: Recipe, resume: bool, data: RunData | None, loader: BackboneLoader
) -> PreparedRun:
    """Check the output folder, and prepare a run with the kernels that it was started with."""
    output = Path(recipe.output)
    recipe = placed(recipe)
    check_trackers(recipe.train.tracker)
    if is_main():
        check_output(output, resume)
    kernels = _kernels_of(output / RECIPE, recipe) if resume else None
    return prepare(recipe, data, kernels, loader)


def _train_and_save(
    prepared: PreparedRun, recipe: Recipe, reporter: Reporter, resume: bool
) -> RunOutcome:
    """Hold the output folder, train, and save the adapter and the report there.

    Args:
        prepared: the run.
        recipe: its recipe as given, without what follows from the data.
        reporter: where progress is reported.
        resume: continue the run in the output folder, if there is one.
    """
    output, chosen = Path(recipe.output), prepared.kernels
    recipe = replace(recipe, dtype=chosen.dtype, attention=chosen.attention)
    if is_main():
        reporter = Several([reporter, start_trackers(prepared.recipe, reporter, resume=resume)])
    page = _page(prepared, output, reporter)
    written = partial(_write_recipe, output, recipe)
    with hold_output(output, resume) if is_main() else nullcontext():
        try:
            result = loop.train(training_session(prepared, reporter, resume, written, page))
        finally:
            stages.unfreeze_all(prepared.adapter)
        outcome = _save(prepared, output, result)
        if page is None:
            return outcome
        said = (*outcome.verdict, *one_class(page.only_class))
        return replace(outcome, page=page.finish(), verdict=said)


def _page(prepared: PreparedRun, output: Path, reporter: Reporter) -> RunPage | None:
    """Return the writer of the report, in the first process, unless it is turned off."""
    if not prepared.recipe.train.report or not is_main():
        return None
    latest = LatestPredictions(prepared.data.task, prepared.rows.evaluation)
    return RunPage(output, latest, reporter.note)


def _kernels_of(path: Path, recipe: Recipe) -> KernelChoice | None:
    """Return the kernels that a run to resume was started with, if it was started."""
    if not path.exists():
        return None
    try:
        started = read(path)
    except ConfigError:
        return None
    return KernelChoice(recipe.dtype or started.dtype, recipe.attention or started.attention)


def _write_recipe(output: Path, recipe: Recipe) -> None:
    """Write `recipe.yaml` in the first process, unless the file says the same already.

    Raises:
        OutputError: there is another recipe and no checkpoint, or the folder cannot be written.
    """
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
) -> loop.TrainingSession:
    """Return the session of a prepared run; notes for the user are reported.

    Args:
        prepared: the run.
        reporter: where progress is reported.
        resume: continue from the last checkpoint, if there is one.
        checked: called when all checks have passed, before anything is written.
        page: the writer of the report, if there is one.
    """
    recipe, data = prepared.recipe, prepared.data
    for note in prepared.notes:
        reporter.note(note)
    for warning in stages.unreached(prepared.adapter, begun_epochs(prepared)):
        reporter.note(warning)

    if slow := cpu_note(prepared.model):
        reporter.note(f"note: {slow}")

    trainee, loss = AdapterTrainee(prepared.adapter), prepared.own_loss or model_loss
    stream, items = drawn_batches(prepared), data.task.loss_items(prepared.train)
    return loop.TrainingSession(
        Engine(trainee, prepared.options, loss, items),
        lambda epoch: stream or epoch_batches(prepared, epoch),
        _evaluation(prepared, page),
        output=Path(recipe.output),
        seed=recipe.seed,
        main_metric=data.task.main_metric,
        resume=resume,
        run=_record(prepared),
        reporter=Several([reporter, page]) if page else reporter,
        checked=checked,
        speedups=_speedups(prepared, reporter.note),
    )


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
    prepared: PreparedRun, page: RunPage | None
) -> Callable[[], dict[str, float]] | None:
    """Return what evaluates a run, and keeps its predictions for the report; None: no rows."""
    evaluation, options = prepared.evaluation, prepared.options
    if evaluation is None:
        return None

    def evaluate() -> dict[str, float]:
        record = page.latest.predictions if page else None
        if record is not None:
            record.clear()
        with divided_evaluation(sharded=bool(options.shard), together=options.tensor_parallel):
            size = options.eval_batch_size
            return prepared.data.task.evaluate(prepared.model, evaluation, size, record)

    return evaluate


def _record(prepared: PreparedRun) -> dict[str, Any]:
    """Return what a checkpoint records of a run: one of another run is not continued."""
    adapter = prepared.adapter
    pooling = {"pooling": adapter.pooling.how} if adapter.pooling else {}
    return {
        "recipe": _identity(prepared.recipe),
        "data": _data_hash(prepared.data),
        "backbone": adapter.state.fingerprint(),
        **pooling,
        **_origin(prepared),
        **prepared.founded.identity(),
    }


def _origin(prepared: PreparedRun) -> dict[str, Any]:
    """Return the record of the adapter that a run started from, if it did."""
    return {"from": prepared.start.origin.record()} if prepared.start else {}


def _stops(prepared: PreparedRun) -> dict[str, list[int]]:
    """Return the tokens behind a learned text, if the backbone does not stop at them itself."""
    stops = prepared.data.task.stops(prepared.train.setting)
    new = prepared.adapter.state.new_stops(stops)
    return {STOPS: new} if new else {}


def _identity(recipe: Recipe) -> dict[str, Any]:
    """Return the part of the recipe that determines the adapter's bytes: no paths of a machine."""
    fields = to_dict(recipe) | {
        "method": list(dump_methods(parse_methods(recipe.method))),  # type: ignore[arg-type]
        "task": dump_task(parse_task(recipe.task)),
    }
    # Older versions refuse options that they lack, also with a value that changes nothing.
    fields["data"] = _portable(fields["data"])
    if recipe.tasks:
        mixed = fields.pop("tasks")
        fields["tasks"] = {n: own | {"data": _portable(own["data"])} for n, own in mixed.items()}
        fields["mixing"] = dump_mixing(parse_mixing(recipe.mixing))
    else:
        del fields["tasks"], fields["mixing"]
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


def _data_hash(data: RunData) -> str:
    return hashlib.sha256((data_hash(data.train) + data_hash(data.evaluation)).encode()).hexdigest()


def _save(prepared: PreparedRun, output: Path, result: loop.TrainingResult) -> RunOutcome:
    adapter, recipe, data = prepared.adapter, prepared.recipe, prepared.data
    metrics = result.best or result.last
    adapter.metadata.metrics = dict(metrics)
    # A method built from trained adapters records their names, not the folders they came from.
    method = {"method": list(dump_methods(adapter.methods)), "train": to_dict(recipe.train)}
    adapter.metadata.training = {
        "recipe": _identity(recipe) | method,
        "data": {
            "sha256": _data_hash(data),
            "train": len(data.train),
            "eval": len(data.evaluation),
        },
        "kind": data.task.head,
        "seed": recipe.seed,
        "steps": result.steps,
        **_origin(prepared),
        **prepared.founded.record(),
        **_stops(prepared),
        "backbone_parameters": sum(map(size_of, adapter.anatomy.parameters().values())),
    }
    folder = output / "adapter"
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
    heads = total - adapter.count()
    return RunOutcome(folder, metrics, result, adapter.count(), heads, size, tuple(said))


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

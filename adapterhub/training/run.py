"""A training run from its recipe to its files: prepare, train, save."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterhub.config.options import to_dict
from adapterhub.data.examples import data_hash
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, OutputError
from adapterhub.files.atomic import replace_file
from adapterhub.methods._spec import dump_methods, parse_methods
from adapterhub.tasks import dump_task, parse_task
from adapterhub.training import checkpoint, loop, stages
from adapterhub.training.batching import LazyBatches, batch_order
from adapterhub.training.output_folder import RECIPE, check_output, hold_output, writing
from adapterhub.training.prepare import PreparedRun, prepare
from adapterhub.training.processes import check_launcher, is_main, wait_for_everyone
from adapterhub.training.recipe import DATA_SOURCES, Recipe, read
from adapterhub.training.report import Reporter
from adapterhub.training.run_data import RunData
from adapterhub.training.trainee import AdapterTrainee


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run: the adapter's folder, its metrics and sizes."""

    folder: Path
    metrics: dict[str, float]
    result: loop.TrainingResult
    parameters: int
    head_parameters: int
    adapter_bytes: int


def run(recipe: Recipe, reporter: Reporter, *, resume: bool = False) -> RunOutcome:
    """Train, evaluate and save.

    The output folder gets `adapter/` (the files to publish), `recipe.yaml`, `metrics.jsonl`,
    `timings.jsonl` and `checkpoints/`. With several processes, the first one writes them.

    Args:
        recipe: the recipe.
        reporter: where progress is reported.
        resume: continue the run in the output folder, if there is one.

    Raises:
        AdapterhubError: of any type; the folder is neither created nor changed unless training
            could start.
    """
    output = Path(recipe.output)
    check_launcher()
    if is_main():
        check_output(output, resume)
    prepared = prepare(recipe)
    with hold_output(output, resume) if is_main() else nullcontext():
        try:
            result = _train(prepared, reporter, resume, lambda: _write_recipe(output, recipe))
        finally:
            stages.unfreeze_all(prepared.adapter)
        return _save(prepared, output, result)


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
        replace_file(path, recipe.to_yaml().encode())


def _is_recipe(path: Path, recipe: Recipe) -> bool:
    """Return whether a file has this recipe; the folder may have been moved."""
    try:
        return read(path, flags={"output": recipe.output}) == recipe
    except ConfigError:
        return False


def _train(
    prepared: PreparedRun, reporter: Reporter, resume: bool, checked: Callable[[], None]
) -> loop.TrainingResult:
    recipe, data = prepared.recipe, prepared.data
    for note in data.notes:
        reporter.note(note)
    if recipe.train.max_steps is None:
        for warning in stages.unreached(prepared.adapter, recipe.train.epochs):
            reporter.note(warning)

    evaluation, batch_size = prepared.evaluation, recipe.train.eval_batch_size

    def evaluate() -> dict[str, float]:
        assert evaluation is not None
        return data.task.evaluate(prepared.model, evaluation, batch_size)

    return loop.train(
        AdapterTrainee(prepared.adapter),
        lambda epoch: _batches(prepared, epoch),
        None if evaluation is None else evaluate,
        recipe.train,
        output=Path(recipe.output),
        seed=recipe.seed,
        main_metric=data.task.main_metric,
        resume=resume,
        run={
            "recipe": _identity(recipe),
            "data": _data_hash(data),
            "backbone": prepared.adapter.state.fingerprint(),
        },
        reporter=reporter,
        checked=checked,
    )


def _batches(prepared: PreparedRun, epoch: int) -> LazyBatches:
    options, encoded = prepared.recipe.train, prepared.train
    order = batch_order(
        encoded.lengths, options.batch_size, epoch, prepared.recipe.seed, options.length_grouped
    )
    return LazyBatches(order, lambda indices: encoded.batch(indices, epoch))


def _identity(recipe: Recipe) -> dict[str, Any]:
    """Return the part of the recipe that determines the adapter's bytes: no paths of a machine."""
    fields = to_dict(recipe) | {
        "method": list(dump_methods(parse_methods(recipe.method))),  # type: ignore[arg-type]
        "task": dump_task(parse_task(recipe.task)),
    }
    fields["data"] = {
        k: v for k, v in fields["data"].items() if k not in DATA_SOURCES and not _is_left_open(k, v)
    }
    return {k: v for k, v in fields.items() if k not in ("output", "train", "backbone")}


def _is_left_open(name: str, value: object) -> bool:
    """Return whether a data option is unset that earlier versions do not know, or not as unset."""
    newer = ("text", "label", "header", "delimiter", "encoding", "skip_empty", "eval_rows")
    return name in newer and value == getattr(DataOptions(), name)


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
    }
    folder = output / "adapter"
    if is_main():
        adapter.save(folder, overwrite=True)
    wait_for_everyone()
    total = sum(p.numel() for p in adapter.parameters())
    size = sum(file.stat().st_size for file in folder.iterdir())
    return RunOutcome(folder, metrics, result, adapter.count(), total - adapter.count(), size)

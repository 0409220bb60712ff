"""A training run from its recipe to its files: prepare, train, save."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterhub.config.options import to_dict
from adapterhub.data.examples import data_hash
from adapterhub.errors import OutputError
from adapterhub.files.atomic import replace_file
from adapterhub.methods._spec import dump_methods, parse_methods
from adapterhub.tasks import dump_task, parse_task
from adapterhub.training import loop, stages
from adapterhub.training.batching import LazyBatches, batch_order
from adapterhub.training.prepare import PreparedRun, RunData, prepare
from adapterhub.training.processes import check_launcher, is_main, wait_for_everyone
from adapterhub.training.recipe import DATA_SOURCES, Recipe
from adapterhub.training.report import Reporter
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
        AdapterhubError: of any type; the folder is not created unless training could start.
    """
    output = Path(recipe.output)
    check_launcher()
    if is_main():
        check_output(output, resume)
    prepared = prepare(recipe)
    if is_main():
        _create_output(output, recipe)
    try:
        result = _train(prepared, output, reporter, resume)
    finally:
        stages.unfreeze_all(prepared.adapter)
    return _save(prepared, output, result)


def check_output(output: Path, resume: bool) -> None:
    """Refuse an unusable output folder before any work is done.

    Raises:
        OutputError: it contains a run already (without `resume`), is a file, or cannot be created.
    """
    if output.exists() and not output.is_dir():
        raise OutputError(f"{output} is a file", expected="a new folder for the run")
    if output.is_dir() and any(output.iterdir()) and not resume:
        raise OutputError(
            f"the output folder {output} exists",
            expected="a new folder for the run",
            hint="another --output, or --resume to continue the run in it",
        )
    parent = next(p for p in (output, *output.parents, Path.cwd()) if p.is_dir())
    if not os.access(parent, os.W_OK):
        raise OutputError(f"{parent} is not writable", hint="another --output")


def _create_output(output: Path, recipe: Recipe) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        replace_file(output / "recipe.yaml", recipe.to_yaml().encode())
    except OSError as error:
        raise OutputError(
            f"{output} cannot be written: {error.strerror}", hint="another --output"
        ) from error


def _train(
    prepared: PreparedRun, output: Path, reporter: Reporter, resume: bool
) -> loop.TrainingResult:
    recipe, data = prepared.recipe, prepared.data
    if recipe.train.max_steps is None:
        for warning in stages.unreached(prepared.adapter, recipe.train.epochs):
            reporter.note(warning)

    def evaluate() -> dict[str, float]:
        batch_size = recipe.train.eval_batch_size
        return data.task.evaluate(prepared.model, prepared.evaluation, batch_size)

    return loop.train(
        AdapterTrainee(prepared.adapter),
        lambda epoch: _batches(prepared, epoch),
        evaluate,
        recipe.train,
        output=output,
        seed=recipe.seed,
        main_metric=data.task.main_metric,
        resume=resume,
        run={
            "recipe": _identity(recipe),
            "data": _data_hash(data),
            "backbone": prepared.adapter.state.fingerprint(),
        },
        reporter=reporter,
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
    fields["data"] = {k: v for k, v in fields["data"].items() if k not in DATA_SOURCES}
    return {k: v for k, v in fields.items() if k not in ("output", "train", "backbone")}


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

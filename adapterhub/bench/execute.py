"""Run a cell and return its record: train, test on unused rows, and measure the costs."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from adapterhub._version import __version__
from adapterhub.bench.cells import Cell, cell_key
from adapterhub.bench.records import (
    CellRecord,
    Costs,
    PredictedRows,
    Status,
    predicted_rows,
)
from adapterhub.config.options import is_neutral, to_dict
from adapterhub.data.examples import data_hash, notes_on_test, sample
from adapterhub.errors import AdapterhubError, ConfigError, OutputError
from adapterhub.loop.engine import NotFinite
from adapterhub.loop.processes import Stopped
from adapterhub.loop.report import Reporter
from adapterhub.methods.common.base import Method, dump_methods, parse_methods
from adapterhub.pages.row_scores import outcomes_of
from adapterhub.recipe.output_folder import RECIPE
from adapterhub.recipe.recipe import DATA_SOURCES, Recipe
from adapterhub.tasks import Prediction
from adapterhub.tasks.common.infer_task import DEFAULT
from adapterhub.training.loading import BackboneLoader, StartingPoint
from adapterhub.training.run import PreparedRun, RunOutcome, run
from adapterhub.training.run_data import (
    NO_EVALUATION,
    RunData,
    divide,
    one_source,
    read_data,
    sample_rows,
)

TEST_SHARE = 0.2  # share of the training rows, without test data
SPLIT_SEED = 0  # all runs of a study use the same rows


@dataclass(frozen=True)
class TaskData:
    """The rows of one task of a study.

    `run` contains the rows for training and for selection; `test` is used for neither.
    """

    run: RunData
    test: list[Any]
    notes: tuple[str, ...]

    def of(self, rows: int, seed: int) -> RunData:
        """Return the data of a run with `rows` training rows, drawn by its seed."""
        return replace(self.run, train=sample(self.run.train, rows, seed), notes=())

    @cached_property
    def digests(self) -> dict[str, str]:
        """The sha256 of each part."""
        parts = {"train": self.run.train, "select": self.run.evaluation, "test": self.test}
        return {name: data_hash(part) for name, part in parts.items()}


def read_task_data(recipe: Recipe, test: str | None, select_rows: int) -> TaskData:
    """Read and split the data of a task.

    Without test data, a fifth of the training rows is held out. Without evaluation data, a tenth of
    the rest is held out. Both have the same shares of each label, and equal texts stay together.

    Raises:
        ConfigError: the recipe has no evaluation, or has test data of a run.
        DataError: the data are missing or broken, do not fit the task, or are too few.
    """
    if recipe.data.eval == NO_EVALUATION:
        raise ConfigError(
            "--eval none: a study selects learning rates and checkpoints by an evaluation",
            hint="leave --eval out; rows are then held out for it",
        )
    if recipe.data.test is not None:
        raise ConfigError(
            f"data.test={recipe.data.test} in a study, which has test data of its own",
            expected="--test FILE (bench.test), or none: a fifth of the training rows is held out",
        )
    if recipe.data.stream:
        raise ConfigError(
            "data.stream=true: a study draws and compares rows in memory",
            hint="leave out data.stream, and choose data.rows",
        )
    one_source(recipe, "a study")
    most = min(select_rows, recipe.data.eval_rows or select_rows)
    recipe = replace(recipe, seed=SPLIT_SEED)
    if test is not None:
        tested = list(_read(recipe, test).evaluation)
        run = read_data(recipe)
    else:
        whole = read_data(recipe)
        train, tested, note = divide(
            whole.task, list(whole.train), whole.options, SPLIT_SEED, TEST_SHARE, flag="--test"
        )
        run = replace(whole, train=train, notes=(*whole.notes, f"{note} to test"))
    selected = sample_rows(run.task, list(run.evaluation), most, SPLIT_SEED)
    run = replace(run, evaluation=selected)
    notes = [*run.notes, *notes_on_test(run.train, tested, run.labels)]
    sizes = f"{len(run.train):,} rows train, {len(selected):,} select, {len(tested):,} test"
    return TaskData(run, tested, (*dict.fromkeys(notes), sizes))


def _read(recipe: Recipe, source: str) -> RunData:
    return read_data(replace(recipe, data=replace(recipe.data, eval=source, eval_rows=None)))


EVALUATIONS = 4  # of a run
FIT_ROWS = 500  # training rows on which the final runs are also evaluated
# Fields of a recipe that do not change the result, or only through the cell.
_NOT_DECIDING = ("output", "name", "seed", "backbone", "method")
_CONTINUE = "run the same command again to continue"


@dataclass(frozen=True)
class TaskContext:
    """Data shared by the cells of one task.

    The recipe contains the kernels chosen for the study, and `backbone` is the fingerprint. Method
    specs, and the adapters that methods start from, are keyed by the method's name in the study.
    """

    recipe: Recipe
    data: TaskData
    specs: dict[str, object]
    backbone: str
    starts: dict[str, StartingPoint] = field(default_factory=dict)

    @property
    def metric(self) -> str:
        """The metric for selection and comparison."""
        return self.recipe.train.best_metric or self.data.run.task.main_metric

    def key(self, cell: Cell) -> str:
        """Return the digest of a cell; it does not depend on the names or the order of a study."""
        recipe = {**self._deciding(), "method": self.methods(cell.method)}
        return cell_key(cell, [recipe, self.data.digests, self.backbone])

    def _deciding(self) -> dict[str, Any]:
        """Return the fields of the recipe that results depend on, without the method."""
        recipe = {k: v for k, v in _options(self.recipe).items() if k not in _NOT_DECIDING}
        recipe["data"] = {k: v for k, v in recipe["data"].items() if k not in DATA_SOURCES}
        deciding: dict[str, Any] = _without_neutral(recipe)
        return deciding

    def methods(self, label: str) -> list[Any]:
        """Return a method of the study with all its options, and its starting adapter."""
        start = self.starts.get(label)
        return [*dump_methods(self.parsed(label)), *([start.digest] if start else [])]

    def parsed(self, label: str) -> tuple[Method, ...]:
        """Return a method of the study, or the method of the adapter that it starts from."""
        if start := self.starts.get(label):
            return start.methods
        return parse_methods(self.specs[label])  # type: ignore[arg-type]

    def recipe_of(self, cell: Cell, output: Path) -> Recipe:
        """Return the recipe of a cell's run."""
        options = replace(
            self.recipe.train,
            learning_rate=cell.rate,
            max_steps=cell.steps,
            eval_every=-(-cell.steps // EVALUATIONS),
            report=False,
            tensorboard=False,
        )
        return replace(
            self.recipe,
            **self._method(cell.method),
            seed=cell.seed,
            train=options,
            output=str(output),
        )

    def _method(self, label: str) -> dict[str, Any]:
        """Return the recipe fields that define the trained method."""
        if start := self.starts.get(label):
            return {"method": None, "from_": start.reference}
        return {"method": self.specs[label]}


def run_cell(cell: Cell, context: TaskContext, loader: BackboneLoader, work: Path) -> CellRecord:
    """Run a cell, or continue it after a kill, and return its record.

    Raises:
        OutputError: the folder cannot be written.
        Stopped: a signal stopped the run, after its state was saved.
    """
    key = context.key(cell)
    output = work / key
    recipe = context.recipe_of(cell, output)
    fields: dict[str, Any] = {}

    def ended(prepared: PreparedRun, outcome: RunOutcome) -> None:
        fields.update(_results(prepared, outcome, context, cell))

    status: Status = "done"
    try:
        reset_peak_memory()
        begun = (output / RECIPE).exists()
        if not begun:  # killed before the first checkpoint
            shutil.rmtree(output, ignore_errors=True)
        data = context.data.of(cell.rows, cell.seed)
        run(recipe, Reporter(), resume=begun, data=data, loader=loader, ended=ended)
    except Stopped as error:
        raise Stopped(f"{cell.describe()}: {error.problem}", hint=_CONTINUE) from error
    except OutputError:  # unrelated to the cell
        raise
    except AdapterhubError as error:
        status = "diverged" if isinstance(error, NotFinite) else "failed"
        fields = {"error": str(error)}
    record = CellRecord(
        key,
        cell,
        status,
        metric=context.metric,
        origin=_origin(context),
        **fields,
    )
    shutil.rmtree(output, ignore_errors=True)
    return record


def _without_neutral(value: Any) -> Any:
    """Leave out options that change nothing, since later versions add more of them."""
    if not isinstance(value, Mapping):
        return value
    return {k: _without_neutral(v) for k, v in value.items() if not is_neutral(v)}


def _results(
    prepared: PreparedRun, outcome: RunOutcome, context: TaskContext, cell: Cell
) -> dict[str, Any]:
    """Return the fields of a record."""
    costs = Costs(
        trained=outcome.parameters,
        head=outcome.head_parameters,
        backbone=prepared.backbone_parameters,
        file_bytes=outcome.adapter_bytes,
        seconds=outcome.result.seconds,
        train_seconds=_train_seconds(outcome, prepared),
        peak_memory=outcome.result.peak_memory,
    )
    fields: dict[str, Any] = {"selected": dict(outcome.metrics), "costs": costs}
    if cell.stage == "final":
        fields["tested"], fields["rows"] = _test(prepared, context.data.test)
        fitted = sample(prepared.data.train, FIT_ROWS, 0)
        fields["trained"], _ = _test(prepared, fitted)
    return fields


def _train_seconds(outcome: RunOutcome, prepared: PreparedRun) -> float:
    speed = outcome.result.examples_per_second
    rows = outcome.result.steps * prepared.options.batch_size
    return rows * prepared.options.gradient_accumulation / speed if speed else 0.0


def _test(
    prepared: PreparedRun, examples: list[Any]
) -> tuple[dict[str, float], PredictedRows | None]:
    """Evaluate the best tensors on rows; return the metrics and the predictions."""
    task, setting = prepared.data.task, prepared.train.setting
    encoded = task.encode(examples, setting, labelled=True)
    predictions: list[Prediction] = []
    metrics = task.evaluate(
        prepared.model, encoded, prepared.options.eval_batch_size, record=predictions
    )
    file = outcomes_of(task, encoded.examples, predictions, setting.labels, 0)
    rows = predicted_rows(file.kind, file.rows) if file else None
    return {name: float(value) for name, value in metrics.items()}, rows


def _options(recipe: Recipe) -> dict[str, Any]:
    """Return the options of a recipe; an unset task was the default in all records."""
    options = to_dict(recipe)
    return options | {"task": options["task"] or DEFAULT}


def _origin(context: TaskContext) -> dict[str, Any]:
    """Return the origin of a task's results: recipe, data, backbone, device and versions."""
    recipe = {k: v for k, v in _options(context.recipe).items() if k not in ("output", "data")}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {
        "recipe": recipe,
        "data": context.data.digests,
        "backbone": context.backbone,
        "device": f"{device}, {name}, {torch.get_num_threads()} threads of {os.cpu_count()} cores",
        "versions": {
            "adapterhub": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def reset_peak_memory() -> None:
    """Reset this process's peak memory to its current memory, where Linux allows it."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")

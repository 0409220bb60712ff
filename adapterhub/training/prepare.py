"""From a recipe to a run that is ready to start: data, backbone, attached adapter, encoded rows."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.attach import attach
from adapterhub.adapters.attached import only_foundations
from adapterhub.adapters.build import empty_copies
from adapterhub.backbones.identity import ORIGIN
from adapterhub.backbones.pooling import max_positions, trained_length
from adapterhub.errors import ConfigError
from adapterhub.loop.evaluation import divided_evaluation
from adapterhub.loop.sharding import shard
from adapterhub.loop.stages import epochs_needed, waiting_for_plateaus
from adapterhub.methods._base import Method
from adapterhub.methods._site_module import EmbeddingModule
from adapterhub.methods._spec import dump_methods, parse_methods
from adapterhub.recipe.defaults import run_options
from adapterhub.recipe.options import RunOptions
from adapterhub.recipe.recipe import Recipe
from adapterhub.speed.activation_store import KeptActivations
from adapterhub.speed.frozen_cache import RecordedRun
from adapterhub.speed.liger import check_installed
from adapterhub.status import doing
from adapterhub.tasks import Encoded, Setting, Task, dump_task
from adapterhub.tasks._losses import Loss, corrected_loss
from adapterhub.training.kernels import KernelChoice, choose_kernels
from adapterhub.training.lengths import FittedRows
from adapterhub.training.loading import BackboneLoader
from adapterhub.training.mixture import check_one_model, enter_tasks, mix_rows
from adapterhub.training.run_data import RunData, read_data
from adapterhub.training.starting_point import (
    RunFoundations,
    StartingPoint,
    run_foundations,
    starting_point,
)


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start; nothing is written yet."""

    recipe: Recipe
    data: RunData
    model: PreTrainedModel
    processor: Any
    adapter: Adapter
    rows: FittedRows
    kernels: KernelChoice
    activations: KeptActivations
    start: StartingPoint | None = None
    started: str = ""
    founded: RunFoundations = field(default_factory=RunFoundations)

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
        """What of the run may be recorded, of frozen layers."""
        streams, seed = self.data.streams, self.recipe.seed
        return RecordedRun(self.train, self.evaluation, streams, seed, self.activations)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should read before the run starts."""
        chosen = [self.kernels.note] if self.kernels.note else []
        started = [self.started] if self.started else []
        return (*self.data.notes, *self.rows.notes, *chosen, *started, *self.founded.notes())

    @property
    def own_loss(self) -> Loss | None:
        """The loss of a batch in place of the model's; None: the model's own."""
        task = self.data.task
        return task.loss(self.train) or corrected_loss(self.model, task.head)

    @property
    def options(self) -> RunOptions:
        """The options of the run, complete."""
        assert isinstance(self.recipe.train, RunOptions)
        return self.recipe.train


def prepare(
    recipe: Recipe,
    data: RunData | None = None,
    kernels: KernelChoice | None = None,
    loader: BackboneLoader | None = None,
) -> PreparedRun:
    """Load the backbone, attach the adapter and encode; write nothing.

    Args:
        recipe: the recipe.
        data: its data, if it has been read already.
        kernels: dtype and attention implementation of the backbone; None chooses them.
        loader: loads the backbone; a shared one has it from an earlier run.
    """
    check_installed(recipe.train)
    start = starting_point(recipe)
    founded, methods = run_foundations(recipe, _methods(recipe, start))
    data = data or read_data(recipe)
    if data.parts:
        check_one_model(data)
    loader = loader or BackboneLoader()
    first = next(iter(data.parts.values()), data)
    loaded = loader.backbone(recipe, data, kernels or choose_kernels(recipe, first, methods))
    model, processor, kernels = loaded.model, loaded.processor, loaded.kernels
    data = _for_model(data, model)
    below = founded.attach(model)
    with empty_copies(bool(recipe.train.shard) and start is None):
        adapter = attach(model, methods, name=recipe.name, on=below, partial=recipe.partial)
    started = start.give(adapter) if start else ""
    _check_packing(data.task, adapter)
    _check_stages(data, adapter)
    adapter.metadata.task = data.task.name
    rows = _rows(recipe, data, loader, adapter, processor)
    batch_size = recipe.train.batch_size or data.batch_size
    options = replace(recipe.train, max_length=rows.max_length, batch_size=batch_size)
    options = run_options(options, methods, len(rows.train.rows), epochs_needed(adapter))
    recipe = replace(
        recipe,
        dtype=kernels.dtype,
        attention=kernels.attention,
        train=options,
        **_of_data(recipe, data),
        method=recipe.method if recipe.method is not None else list(dump_methods(methods)),
    )
    rows = _with_shards(rows, adapter, options, started=start is not None)
    kept = loaded.activations
    return PreparedRun(
        recipe, data, model, processor, adapter, rows, kernels, kept, start, started, founded
    )


def _rows(
    recipe: Recipe,
    data: RunData,
    loader: BackboneLoader,
    adapter: Adapter,
    processor: Any,
) -> FittedRows:
    """Encode the examples; for several tasks, give the adapter a head for each first.

    Args:
        recipe: the recipe.
        data: its data.
        loader: encodes the examples.
        adapter: the attached adapter.
        processor: the tokenizer or processor.
    """
    positions = max_positions(adapter.model)
    reads = max(positions - virtual_tokens(adapter), 1)
    setting = Setting(processor, reads, adapter.labels, recipe.seed, positions)
    trained = trained_length(Path(getattr(adapter.model, ORIGIN)))

    some = () if data.streams else data.train
    with doing(f"encoding {len(some) + len(data.evaluation):,} examples"):
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
    """Shard the model if the options say so, and return the rows with their reference.

    A sharded model computes the reference, unless the adapter replaces parts of the backbone: these
    cannot be exchanged any more when they are sharded.

    Args:
        rows: the encoded rows.
        adapter: the attached adapter.
        options: the options of the run.
        started: whether the adapter has the tensors of another one.
    """
    size = options.eval_batch_size
    if adapter.replaces or not options.shard:
        rows = _with_reference(
            rows, adapter.model, size, started=started, together=options.tensor_parallel
        )
    if not options.shard:
        return rows
    shard(adapter)
    return (
        rows
        if adapter.replaces
        else _with_reference(rows, adapter.model, size, started=started, sharded=True)
    )


def _with_reference(
    rows: FittedRows,
    model: PreTrainedModel,
    batch_size: int,
    *,
    started: bool,
    sharded: bool = False,
    together: bool = False,
) -> FittedRows:
    """Return rows with their reference, if their task compares with one.

    It is that of the model with the new adapter off, and those below it on; or, if the adapter was
    started from another one, that of the model with it. A resumed run computes it again, before the
    tensors of its checkpoint are loaded.

    Args:
        rows: the rows of a run.
        model: the model, with the new adapter active.
        batch_size: rows per forward pass.
        started: whether the adapter has the tensors of another one.
        sharded: whether each process holds a share of the model.
        together: whether the processes compute each batch together.
    """
    task = rows.train.task
    if not task.compares_with_reference:
        return rows
    parts = (rows.train, rows.evaluation)
    off = nullcontext() if started else only_foundations(model)
    divided = divided_evaluation(sharded=sharded, together=together)
    with off, doing("computing the reference"), divided:
        train, evaluation = (
            task.with_reference(model, part, batch_size) if part.rows else part for part in parts
        )
    return replace(rows, train=train, evaluation=evaluation)


def _for_model(data: RunData, model: PreTrainedModel) -> RunData:
    """Return the data of a run with the options of its tasks that follow from the backbone."""
    parts = {name: _for_model(part, model) for name, part in data.parts.items()}
    task = data.task.for_model(model)
    note = task.model_note if task != data.task else ""
    return replace(data, task=task, parts=parts, notes=(*data.notes, *[note] * bool(note)))


def _of_data(recipe: Recipe, data: RunData) -> dict[str, Any]:
    """Return the options of a recipe that follow from its data, complete."""
    if not data.parts:
        return {"data": data.options, "task": dump_task(data.task)}
    tasks = {
        name: replace(own, task=dump_task(data.parts[name].task), data=data.parts[name].options)
        for name, own in recipe.tasks.items()
    }
    return {"tasks": tasks}


def _methods(recipe: Recipe, start: StartingPoint | None) -> tuple[Method, ...]:
    """Return the methods of a recipe, or those of the adapter that it starts from."""
    if recipe.method is None and start is not None:
        return start.methods
    return parse_methods(recipe.method)  # type: ignore[arg-type]


def _check_packing(task: Task, adapter: Adapter) -> None:
    virtual = {p.method.name for p in adapter.placed if p.site.kind == "embed"}
    if task.packs and virtual:
        raise ConfigError(
            f"{', '.join(virtual)} prepends virtual tokens to each row, where only the first of "
            "its packed texts can attend to them",
            hint="pack=false",
        )


def _check_stages(data: RunData, adapter: Adapter) -> None:
    if not data.evaluation and (waiting := waiting_for_plateaus(adapter)):
        raise ConfigError(
            f"{', '.join(waiting)} begins a stage when evaluations no longer improve, and there is "
            "no evaluation",
            hint="--eval FILE, or stages by epochs",
        )


def virtual_tokens(adapter: Adapter) -> int:
    """Count the positions that an adapter takes in front of each text."""
    modules = [placed.module for placed in adapter.placed if placed.site.kind == "embed"]
    with torch.no_grad():
        return sum(
            len(module()) + module.skipped_positions
            for module in modules
            if isinstance(module, EmbeddingModule)
        )

"""Prepare a run from its recipe: data, backbone, attached adapter, encoded rows.

The adapters that a run starts from, or trains on top of, are found, verified and recorded. Those
below are active below the new adapter. A method that is built from other adapters, such as
adapterfusion, copies them instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from adapterhub.adapters.activation import text_positions
from adapterhub.adapters.adapter import Adapter, NamedHead
from adapterhub.adapters.attach import attach, empty_copies, free_name
from adapterhub.adapters.heads import add_heads, select_head
from adapterhub.adapters.load import bring_foundation
from adapterhub.adapters.route import only_foundations
from adapterhub.adapters.warm_start import start_from
from adapterhub.backbones.fingerprint import fingerprint
from adapterhub.backbones.pooling import trained_length
from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.data.examples import data_hash
from adapterhub.errors import ConfigError
from adapterhub.files.native import Foundation
from adapterhub.loop.processes import divided_evaluation, process_count
from adapterhub.loop.sharding import shard
from adapterhub.loop.trainee import epochs_needed, waiting_for_plateaus
from adapterhub.methods.common.base import Method, dump_methods, parse_methods, restore_methods
from adapterhub.recipe.recipe import Recipe, RunOptions, run_options
from adapterhub.registry.local import registry_at
from adapterhub.registry.pull import foundation_of, pull_verified, read_reference
from adapterhub.registry.store import Reference
from adapterhub.speed.compiled_layers import check_installed
from adapterhub.speed.frozen_cache import KeptActivations, RecordedRun
from adapterhub.status import doing
from adapterhub.tasks import Encoded, Setting, Task, dump_task
from adapterhub.tasks.common.batches import Loss, corrected_loss
from adapterhub.training.loading import (
    BackboneLoader,
    FittedRows,
    KernelChoice,
    choose_kernels,
    mix_rows,
)
from adapterhub.training.run_data import RunData
from adapterhub.training.task_mixture import TaskSwitch


@dataclass(frozen=True)
class StartingPoint:
    """A trained adapter with local, verified files: its name in a recipe, and its methods."""

    reference: str
    found: Foundation
    methods: tuple[Method, ...]

    @property
    def digest(self) -> str:
        """The sha256 of its manifest, which contains the digests of its tensors."""
        return self.found.ref.digest

    def give(self, adapter: Adapter) -> str:
        """Copy its tensors into a new adapter, and return a sentence about its head.

        Raises:
            MismatchError: the backbone, method, sizes or sites differ.
        """
        started = start_from(adapter, self.found.saved)
        text = f"starts from {self.reference}"
        if adapter.head is None:
            return text
        if started.taken:
            return f"{text}, with its head, since the labels are the same"
        return f"{text}, with a newly initialized head: {started.reason}"


def starting_point(recipe: Recipe) -> StartingPoint | None:
    """Find the adapter that a recipe starts from, download it if necessary, and verify it.

    Raises:
        ConfigError: the reference is invalid.
        RegistryError: the reference cannot be resolved.
        FileError: its files are broken, or belong to another library.
    """
    if recipe.from_ is None:
        return None
    found = _found(recipe.from_, recipe)
    manifest = found.saved.manifest
    methods = restore_methods(manifest.methods, f"the adapter {manifest.name!r}")
    return StartingPoint(recipe.from_, found, methods)


def _found(text: str, recipe: Recipe) -> Foundation:
    """Find and verify an adapter that is named in a recipe."""
    parsed = read_reference(text)
    fetched = pull_verified(parsed, backbone=_backbone_of(parsed, recipe))
    return foundation_of(fetched.reference or parsed, fetched.own())


def _backbone_of(reference: Reference, recipe: Recipe) -> str | None:
    """Return the backbone's fingerprint if a name has adapters for several backbones, else None."""
    if reference.kind != "local":
        return None
    versions = registry_at(None).versions(reference.name)
    if len({entry.fingerprint for entry in versions}) < 2:
        return None
    return fingerprint(recipe.backbone, revision=recipe.revision)


@dataclass(frozen=True)
class RunOrigins:
    """The trained adapters that a run starts from or trains on top of.

    Attributes:
        start: the adapter whose tensors initialize the new one.
        below: the adapters below the new one.
        copied: the adapters that its method is built from.
    """

    start: StartingPoint | None = None
    below: tuple[Foundation, ...] = ()
    copied: tuple[Foundation, ...] = ()

    def attach(self, model: PreTrainedModel) -> list[str]:
        """Attach the adapters below, frozen, and return their names on the model.

        Raises:
            MismatchError: an adapter is for another backbone, or cannot be below others.
        """
        return [bring_foundation(model, each).name for each in self.below]

    def notes(self) -> Iterator[str]:
        """Yield notes for the user to read before the run starts."""
        if self.below:
            yield f"trains on top of {_named(self.below)}, frozen"
        if self.copied:
            yield f"built from copies of {_named(self.copied)}"

    def record(self) -> dict[str, Any]:
        """Return the manifest's record of the adapters that were started from or copied."""
        on = [asdict(each.ref) for each in self.copied]
        return {**self._from(), **({"on": on} if on else {})}

    def identity(self) -> dict[str, Any]:
        """Return the checkpoint's record; a run on other adapters is a different run."""
        on = [each.ref.digest for each in (*self.below, *self.copied)]
        return {**self._from(), **({"on": on} if on else {})}

    def _from(self) -> dict[str, Any]:
        if self.start is None:
            return {}
        ref = self.start.found.ref
        return {"from": {"name": ref.name, "version": ref.version, "digest": ref.digest}}


def run_origins(recipe: Recipe) -> tuple[RunOrigins, tuple[Method, ...]]:
    """Find the adapters that a recipe starts from and trains on; return them with its methods.

    If the recipe has no methods, those of the adapter that it starts from are used. A method that
    is built from trained adapters gets the adapters that the recipe trains on.

    Raises:
        ConfigError: a reference is invalid.
        RegistryError: a reference cannot be resolved.
        FileError: the files of an adapter are broken, or belong to another library.
    """
    start = starting_point(recipe)
    if recipe.method is None and start is not None:
        methods = start.methods
    else:
        methods = parse_methods(recipe.method)  # type: ignore[arg-type]
    found = tuple(_found(text, recipe) for text in dict.fromkeys(recipe.on))
    sources = [str(each.saved.folder) for each in found]
    for number, method in enumerate(methods if found else ()):
        if (built := method.with_sources(sources)) is not None:
            methods = (*methods[:number], built, *methods[number + 1 :])
            return RunOrigins(start, copied=found), methods
    return RunOrigins(start, below=found), methods


def _named(foundations: Sequence[Foundation]) -> str:
    return ", ".join(f"{each.ref} (sha256 {each.ref.digest[:12]})" for each in foundations)


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

    @property
    def model(self) -> PreTrainedModel:
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
        return record

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
        _check_one_model(data)
    first = next(iter(data.parts.values()), data)
    loaded = loader.backbone(recipe, data, kernels or choose_kernels(recipe, first, methods))
    model, kernels = loaded.model, loaded.kernels
    data = _for_model(data, model)
    below = origins.attach(model)
    name = recipe.name or free_name(recipe.adapter_name, below)
    with empty_copies(bool(recipe.train.shard) and start is None):
        adapter = attach(model, methods, name=name, on=below, partial=recipe.partial)
    started = start.give(adapter) if start else ""
    _check_packing(data.task, adapter)
    _check_stages(data, adapter)
    adapter.metadata.task = data.task.name
    rows = _rows(recipe, data, loader, adapter, loaded.processor)
    batch_size = recipe.train.batch_size or data.batch_size
    options = replace(recipe.train, max_length=rows.max_length, batch_size=batch_size)
    options = run_options(options, methods, len(rows.train.rows), epochs_needed(adapter))
    options = _with_init(options, recipe, started=start is not None)
    recipe = replace(
        recipe,
        dtype=kernels.dtype,
        attention=kernels.attention,
        train=options,
        **_of_data(recipe, data),
        method=recipe.method if recipe.method is not None else list(dump_methods(methods)),
    )
    notes = (
        *data.chosen,
        *data.notes,
        *data.notes_on_scores(),
        *rows.notes,
        *filter(None, (kernels.note, started)),
        *origins.notes(),
    )
    rows = _with_shards(rows, adapter, options, started=start is not None)
    return PreparedRun(recipe, data, adapter, rows, notes, loaded.activations, origins)


def _rows(
    recipe: Recipe,
    data: RunData,
    loader: BackboneLoader,
    adapter: Adapter,
    processor: Any,
) -> FittedRows:
    """Encode the examples; with several tasks, first give the adapter a head for each."""
    reads = text_positions(adapter.model, [adapter])
    setting = Setting(processor, reads, adapter.labels, recipe.seed, reads)
    origin = adapter.backbone.folder  # diffusers pipelines do not have one
    trained = trained_length(Path(origin)) if origin else None

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
    return mix_rows(rows, data.task, _enter_tasks(adapter, data, recipe.seed))


def _check_one_model(data: RunData) -> None:
    """Check that one model can serve the tasks, and that several heads use a single process.

    Raises:
        ConfigError: the tasks need different classes of model, or pool differently, or several
            processes would train several heads.
    """
    tasks = {name: part.task for name, part in data.parts.items()}
    autos = {name: " or ".join(TASK_MODELS[task.head].autos) for name, task in tasks.items()}
    if len(set(autos.values())) > 1:
        raise ConfigError(
            "these tasks need models of different classes",
            offenders=[f"{n}: {tasks[n].name} ({auto})" for n, auto in autos.items()],
            expected="tasks of one class: classification, multi-label and regression go together",
            hint="a text-to-text model, with seq2seq for each task",
        )
    if len({task.pooling for task in tasks.values()}) > 1:
        raise ConfigError(
            "these tasks pool differently",
            offenders=[f"{name}: pooling={task.pooling}" for name, task in tasks.items()],
            expected="the same pooling in all tasks",
        )
    if process_count() > 1 and any(TASK_MODELS[task.head].has_head for task in tasks.values()):
        raise ConfigError(
            "several heads train in one process",
            hint="adapterhub train without accelerate launch or torchrun",
        )


def _enter_tasks(adapter: Adapter, data: RunData, seed: int) -> TaskSwitch:
    """Give an adapter the heads of several tasks, and return the switch between them."""
    heads = {
        name: NamedHead(part.task.name, part.task.head, part.labels)
        for name, part in data.parts.items()
    }
    if adapter.head is not None:
        add_heads(adapter, heads, seed)
    adapter.named_heads = heads

    def select(name: str) -> None:
        if adapter.heads:
            select_head(adapter, name)

    return TaskSwitch(next(iter(heads)), select)


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
    task, model, size = rows.train.task, adapter.model, options.eval_batch_size
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


def _for_model(data: RunData, model: PreTrainedModel) -> RunData:
    """Return the data of a run with the task options that depend on the backbone."""
    parts = {name: _for_model(part, model) for name, part in data.parts.items()}
    task = data.task.for_model(model)
    if not (parts or data.streams):
        task = task.for_examples(data.train)
    note = task.model_note if task != data.task else ""
    return replace(data, task=task, parts=parts, notes=(*data.notes, *[note] * bool(note)))


def _of_data(recipe: Recipe, data: RunData) -> dict[str, Any]:
    """Return the complete options of a recipe, including those that depend on its data."""
    if not data.parts:
        return {"data": data.options, "task": dump_task(data.task)}
    tasks = {
        name: replace(own, task=dump_task(data.parts[name].task), data=data.parts[name].options)
        for name, own in recipe.tasks.items()
    }
    return {"tasks": tasks}


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

"""A training run from its recipe: data, backbone, adapter, loop, files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapters.adapter import Adapter, ParameterGroup
from adapterhub.adapters.attach import attach
from adapterhub.backbones.load import load_backbone
from adapterhub.config.options import to_dict
from adapterhub.data.docstrings import load_docstrings
from adapterhub.data.examples import data_hash, sample
from adapterhub.errors import ConfigError, DataError, OutputError
from adapterhub.files.atomic import replace_file
from adapterhub.methods._base import Method
from adapterhub.methods._spec import dump_methods, parse_methods
from adapterhub.tasks import Encoded, Setting, Task, dump_task, parse_task
from adapterhub.training import loop, stages
from adapterhub.training.batching import LazyBatches, batch_order
from adapterhub.training.options import TrainOptions
from adapterhub.training.processes import check_launcher, is_main, own_device, wait
from adapterhub.training.recipe import Recipe
from adapterhub.training.report import Reporter
from adapterhub.training.schedules import DEFAULT

HEAD_LEARNING_RATE = 5e-3
PLACES = ("train", "eval", "train_target", "eval_target")  # where data are, on one machine
BUILTIN = "builtin:docstrings"


@dataclass(frozen=True)
class AdapterTrainee:
    """An adapter as the loop sees it: each method's parameters at the method's own
    learning rate."""

    adapter: Adapter

    @property
    def model(self) -> PreTrainedModel:
        """The model with the adapter on it."""
        return self.adapter.model

    def param_groups(self, options: TrainOptions) -> list[dict[str, Any]]:
        """One group a method and factor on its learning rate, and one for the task head."""
        return [
            {
                "name": _group_name(group),
                "params": [parameter for _, parameter in group.named],
                "lr": _learning_rate(group.method, options) * group.rate,
            }
            for group in self.adapter.groups()
        ]

    def tensors(self) -> dict[str, torch.Tensor]:
        """What trains, live."""
        return self.adapter.tensors()

    @property
    def staged(self) -> bool:
        """Whether a method has a later stage."""
        return any(changed.stage for changed in self.adapter.changed)

    def enter(self, epoch: int, improved: Sequence[bool]) -> bool:
        """By the pace of each method."""
        return stages.enter(self.adapter, epoch, improved)

    def train_mode(self, dropout: bool) -> None:
        """The adapter in training mode, the frozen backbone with or without dropout."""
        self.adapter.train_mode(dropout)


def _group_name(group: ParameterGroup) -> str:
    name = group.method.name if group.method else "head"
    return name if group.rate == 1 else f"{name} x{group.rate:.3g}"


def _learning_rate(method: Method | None, options: TrainOptions) -> float:
    if method is None:
        return options.head_learning_rate or HEAD_LEARNING_RATE
    return options.learning_rate or method.learning_rate


@dataclass(frozen=True)
class Data:
    """The examples of a run, its task and labels."""

    task: Task
    labels: tuple[str, ...]
    train: list[Any]
    evaluation: list[Any]


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start: nothing is written yet."""

    recipe: Recipe
    data: Data
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    adapter: Adapter
    train: Encoded
    evaluation: Encoded


@dataclass(frozen=True)
class Outcome:
    """What a run gave: where its adapter is, and how it went."""

    folder: Path
    metrics: dict[str, float]
    result: loop.TrainingResult
    parameters: int
    head_parameters: int
    adapter_bytes: int


def read_data(recipe: Recipe) -> Data:
    """The examples that a recipe names.

    Raises:
        DataError: they cannot be used, by data.py's rules.
    """
    task = parse_task(recipe.task)
    train = sample(_read(recipe, recipe.data.train, task, "train"), recipe.data.rows, recipe.seed)
    evaluation = _read(recipe, recipe.data.eval, task, "eval")
    labels = task.labels(train)
    task.check(labels, evaluation)
    return Data(task, labels, train, evaluation)


def _read(recipe: Recipe, source: str | None, task: Task, split: str) -> list[Any]:
    if BUILTIN in (source, recipe.data.train):
        return load_docstrings()[("train", "eval").index(split)]
    if source is None:
        raise DataError(
            "the recipe names no evaluation data", hint="--eval FILE (data.eval in the recipe)"
        )
    return task.read(source, recipe.data, split)


def prepare(recipe: Recipe) -> Prepared:
    """Everything up to the first step: reads, checks, loads and attaches, and writes nothing."""
    methods = parse_methods(recipe.method)  # type: ignore[arg-type]
    data = read_data(recipe)
    set_seed(recipe.seed)
    model, tokenizer = load_backbone(
        recipe.backbone,
        task=data.task.head,
        labels=data.labels,
        revision=recipe.revision,
        dtype=recipe.dtype,
        quantize=recipe.quantize,
        new_tokens=recipe.new_tokens,
    )
    make_ready(model)
    adapter = attach(model, methods, name=recipe.name)
    own = next((method.schedule for method in methods if method.schedule), DEFAULT)
    chosen = replace(recipe.train, schedule=recipe.train.schedule or own)  # type: ignore[arg-type]
    recipe = replace(recipe, train=chosen)
    _check_packing(data.task, adapter)
    adapter.metadata.task = data.task.name
    limit = min(recipe.train.max_length, positions_of(model))
    setting = Setting(tokenizer, limit, adapter.labels, recipe.seed, positions_of(model))
    train, evaluation = (
        data.task.encode(examples, setting, labelled=True)
        for examples in (data.train, data.evaluation)
    )
    return Prepared(recipe, data, model, tokenizer, adapter, train, evaluation)


def _check_packing(task: Task, adapter: Adapter) -> None:
    virtual = {p.method.name for p in adapter.placed if p.site.kind == "embed"}
    if task.packs and virtual:
        raise ConfigError(
            f"{', '.join(virtual)} puts virtual tokens before a row, where only the first of its "
            "packed texts would see them",
            hint="pack=false",
        )


def make_ready(model: PreTrainedModel) -> None:
    """Put a model on the device, without a cache in its forward pass: training and evaluation have
    no use for one, and with one transformers does not see that texts are packed."""
    if not getattr(model, "hf_device_map", None):  # quantized weights are where they were made
        model.to(own_device())  # type: ignore[arg-type]
    model.config.use_cache = False


def positions_of(model: PreTrainedModel) -> int:
    """The tokens that a model has positions for."""
    return getattr(model.config, "max_position_embeddings", None) or 1 << 30


def run(recipe: Recipe, reporter: Reporter, *, resume: bool = False) -> Outcome:
    """Train, evaluate, save.

    The run's folder holds `adapter/` (the files to publish), `recipe.yaml`, `metrics.jsonl`,
    `timings.jsonl` and `checkpoints/`. Of several processes the first writes them.

    Raises:
        AdapterhubError: of any kind; the folder is not made unless training could start.
    """
    output = Path(recipe.output)
    check_launcher()
    if is_main():
        check_output(output, resume)
    ready = prepare(recipe)
    if is_main():
        _make(output, recipe)
    try:
        result = _train(ready, output, reporter, resume)
    finally:
        stages.unfreeze_all(ready.adapter)
    return _save(ready, output, result)


def _train(ready: Prepared, output: Path, reporter: Reporter, resume: bool) -> loop.TrainingResult:
    recipe = ready.recipe
    if recipe.train.max_steps is None:
        for sentence in stages.unreached(ready.adapter, recipe.train.epochs):
            reporter.note(sentence)
    return loop.train(
        AdapterTrainee(ready.adapter),
        lambda epoch: _epoch(ready, epoch),
        lambda: ready.data.task.evaluate(
            ready.model, ready.evaluation, recipe.train.eval_batch_size
        ),
        recipe.train,
        output=output,
        seed=recipe.seed,
        main_metric=ready.data.task.main_metric,
        resume=resume,
        run={
            "recipe": _identity(recipe),
            "data": _data_hash(ready.data),
            "backbone": ready.adapter.manifest().backbone.fingerprint,
        },
        reporter=reporter,
    )


def _identity(recipe: Recipe) -> dict[str, Any]:
    """What of the recipe decides the bytes of the adapter: not where it is written."""
    fields = to_dict(recipe) | {
        "method": list(dump_methods(parse_methods(recipe.method))),  # type: ignore[arg-type]
        "task": dump_task(parse_task(recipe.task)),
    }
    fields["data"] = {k: v for k, v in fields["data"].items() if k not in PLACES}
    return {k: v for k, v in fields.items() if k not in ("output", "train", "backbone")}


def _data_hash(data: Data) -> str:
    return hashlib.sha256((data_hash(data.train) + data_hash(data.evaluation)).encode()).hexdigest()


def check_output(output: Path, resume: bool) -> None:
    """Refuse an output folder that is taken, or that cannot be made, before any work is done.

    Raises:
        OutputError: which, and what to type.
    """
    if output.exists() and not output.is_dir():
        raise OutputError(f"{output} is a file", expected="a new folder for the run")
    if output.is_dir() and any(output.iterdir()) and not resume:
        raise OutputError(
            f"the output folder {output} exists",
            expected="a new folder for the run",
            hint="another --output, or --resume to go on with the run in it",
        )
    parent = next(p for p in (output, *output.parents, Path.cwd()) if p.is_dir())
    if not os.access(parent, os.W_OK):
        raise OutputError(f"{parent} cannot be written", hint="another --output")


def _make(output: Path, recipe: Recipe) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        replace_file(output / "recipe.yaml", recipe.to_yaml().encode())
    except OSError as error:
        raise OutputError(
            f"{output} cannot be written: {error.strerror}", hint="another --output"
        ) from error


def _epoch(ready: Prepared, epoch: int) -> LazyBatches:
    recipe, encoded = ready.recipe, ready.train
    options = recipe.train
    order = batch_order(
        encoded.lengths, options.batch_size, epoch, recipe.seed, options.length_grouped
    )
    return LazyBatches(order, lambda indices: encoded.batch(indices, epoch))


def _save(ready: Prepared, output: Path, result: loop.TrainingResult) -> Outcome:
    adapter, recipe = ready.adapter, ready.recipe
    metrics = result.best or result.last
    adapter.metadata.metrics = dict(metrics)
    # A method that was built of adapters names these, not the folders where they lay.
    method = {"method": list(dump_methods(adapter.methods)), "train": to_dict(recipe.train)}
    adapter.metadata.training = {
        "recipe": _identity(recipe) | method,
        "data": {
            "sha256": _data_hash(ready.data),
            "train": len(ready.data.train),
            "eval": len(ready.data.evaluation),
        },
        "kind": ready.data.task.head,
        "seed": recipe.seed,
        "steps": result.steps,
    }
    folder = output / "adapter"
    if is_main():
        adapter.save(folder, overwrite=True)
    wait()
    total = sum(p.numel() for p in adapter.parameters())
    size = sum(file.stat().st_size for file in folder.iterdir())
    return Outcome(folder, metrics, result, adapter.count(), total - adapter.count(), size)

"""Open a trained adapter for use: its backbone, its head, its labels, from its folder alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.load import load_folder
from adapterhub.backbones.load import TASK_MODELS, load_backbone
from adapterhub.config.options import from_dict
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, FileError, MergeError
from adapterhub.files.manifest import Manifest
from adapterhub.files.native import read_manifest
from adapterhub.files.run_folder import backbone_of_run
from adapterhub.registry.pull import pull
from adapterhub.tasks import TASKS, Prediction, Setting, Task, parse_task
from adapterhub.training.run import PLACES, make_ready, positions_of


@dataclass(frozen=True)
class Opened:
    """A model, with or without an adapter, ready to predict."""

    model: PreTrainedModel
    task: Task
    setting: Setting

    def predict(self, examples: Sequence[Any], batch_size: int = 64) -> list[Prediction]:
        """One prediction an example."""
        encoded = self.task.encode(examples, self.setting, labelled=False)
        return self.task.predict(self.model, encoded, batch_size)

    def evaluate(self, examples: Sequence[Any], batch_size: int = 64) -> dict[str, float]:
        """The task's metrics on labelled examples.

        Raises:
            DataError: their labels are not those of the adapter.
        """
        self.task.check(self.setting.labels, examples)
        encoded = self.task.encode(examples, self.setting, labelled=True)
        return self.task.evaluate(self.model, encoded, batch_size)


def open_adapter(reference: str | Path, backbone: str | None = None) -> Opened:
    """The adapter of a reference (a run's folder too) on the backbone that it names.

    `backbone` is where to load it from instead; the fingerprint decides whether it is the right
    one.

    Raises:
        ConfigError, RegistryError: no reference, or nothing is there.
        FileError: there is no adapter, or its files are broken.
        BackboneError: its backbone cannot be loaded.
        MismatchError: the backbone or the tokenizer is another.
    """
    files = pull(reference)
    manifest = read_manifest(files)
    known = _recorded(manifest)
    task = known.task
    model, tokenizer = open_bare(files, backbone)
    make_ready(model)
    labels = load_folder(model, files).labels
    limit = min(known.max_length, positions_of(model))
    setting = Setting(tokenizer, limit, labels, known.seed, positions_of(model))
    return Opened(model, task, setting)


def open_bare(
    files: Path,
    backbone: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The backbone that an adapter's files name, for its task, without the adapter; and the
    tokenizer. With a `dtype` it is whole; by default as it was when the adapter was trained by a
    recipe, quantized or not, unless `quantize` says how.

    Raises:
        BackboneError: it cannot be loaded.
    """
    manifest = read_manifest(files)
    trained = {} if dtype else manifest.training.get("recipe", {})
    return load_backbone(
        backbone or backbone_of_run(files) or manifest.backbone.id,
        task=_recorded(manifest).task.head,
        labels=manifest.labels,
        revision=None if backbone else manifest.backbone.revision,
        dtype=dtype or trained.get("dtype"),
        quantize=quantize or trained.get("quantize"),
    )


def open_backbone(backbone: str, task: Task, max_length: int = 128) -> Opened:
    """A backbone as it is, for a task that needs no trained head: the baseline of all training.

    Raises:
        ConfigError: the task has a head, which training must make first.
        BackboneError: it cannot be loaded.
    """
    if TASK_MODELS[task.head].has_head:
        free = sorted(n for n, cls in TASKS.items() if not TASK_MODELS[cls().head].has_head)
        raise ConfigError(
            f"{task.name} needs a trained head", expected=f"an adapter, or one of {', '.join(free)}"
        )
    model, tokenizer = load_backbone(backbone, task=task.head)
    make_ready(model)
    limit = min(max_length, positions_of(model))
    return Opened(model, task, Setting(tokenizer, limit, positions=positions_of(model)))


@dataclass(frozen=True)
class TrainingRecord:
    """What an adapter was trained on: the task, and options that are defaults for new data."""

    task: Task
    data: DataOptions
    max_length: int = 128
    seed: int = 0


@dataclass(frozen=True)
class _Record:
    data: DataOptions
    max_length: int
    seed: int

    def __post_init__(self) -> None:
        if self.max_length < 1 or self.seed < 0:
            raise ConfigError(
                f"max_length is {self.max_length}, seed is {self.seed}",
                expected="a length of 1 or more, a seed of 0 or more",
            )


def trained(reference: str | Path) -> TrainingRecord:
    """What an adapter was trained on; no model is loaded.

    Raises:
        FileError: there is no adapter, its files are broken, or what it says of its training is no
            record of a run.
    """
    return _recorded(read_manifest(pull(reference)))


def _recorded(manifest: Manifest) -> TrainingRecord:
    """What is used again of the recipe in a manifest. It may be a stranger's: columns and formats
    are taken from it, but no place where data are."""
    try:
        recipe = _mapping(manifest.training, "recipe")
        data, train = _mapping(recipe, "data"), _mapping(recipe, "train")
        record = from_dict(
            _Record,
            {
                "data": {k: v for k, v in data.items() if k not in (*PLACES, "rows")},
                "max_length": train.get("max_length", 128),
                "seed": manifest.training.get("seed", 0),
            },
        )
        task = parse_task(recipe.get("task") or manifest.task or "classification")
    except ConfigError as error:
        raise FileError(
            f"what {manifest.name!r} records of its training cannot be used",
            offenders=[error.problem, *error.offenders],
            expected="the record of a run of this version of adapterhub, or of an older one",
        ) from error
    return TrainingRecord(task, record.data, record.max_length, record.seed)


def _mapping(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = parent.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is no mapping")
    return value


def open_live(
    folder: str | Path,
    backbone: str | None = None,
    dtype: str | None = "fp32",
    name: str | None = None,
) -> tuple[Adapter, PreTrainedTokenizerBase]:
    """The adapter of a folder (a run's, or the `adapter` in it) on its backbone, and the tokenizer.
    The backbone is loaded whole in this dtype whatever it was trained on; without a dtype it is
    quantized as it was then. `name` renames the adapter.

    Raises:
        MergeError: without a dtype, where the backbone was not quantized.
        FileError, BackboneError, MismatchError: as `open_adapter`.
    """
    files = pull(folder)
    quantize = None if dtype else read_manifest(files).backbone.quantization
    if dtype is None and quantize is None:
        raise MergeError(
            f"{folder} was trained on a backbone that is not quantized: there is nothing to "
            "quantize again",
            hint="adapterhub merge without --requantize",
        )
    model, tokenizer = open_bare(files, backbone, dtype, quantize)
    return load_folder(model, files, name=name), tokenizer

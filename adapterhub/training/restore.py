"""Open a trained adapter for use: its backbone, its head, its labels, from its folder alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.backbones.load import TASK_MODELS, load_backbone
from adapterhub.config import from_dict
from adapterhub.errors import ConfigError
from adapterhub.files.manifest import Manifest
from adapterhub.files.native import read_manifest
from adapterhub.loading import load
from adapterhub.registry.verbs import pull
from adapterhub.training.data import DataOptions
from adapterhub.training.run import make_ready, positions_of
from adapterhub.training.tasks import TASKS, Prediction, Setting, Task, task_of
from adapterhub.yaml12 import load_yaml


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
    task = _task_of(manifest)
    model, tokenizer = open_bare(files, backbone)
    make_ready(model)
    labels = load(model, files).labels
    trained = manifest.training.get("recipe", {}).get("train", {})
    limit = min(int(trained.get("max_length", 128)), positions_of(model))
    seed = int(manifest.training.get("seed", 0))
    setting = Setting(tokenizer, limit, labels, seed, positions_of(model))
    return Opened(model, task, setting)


def open_bare(
    files: Path, backbone: str | None = None, dtype: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The backbone that an adapter's files name, for its task, without the adapter; and the
    tokenizer. With a `dtype` it is whole; by default as it was when the adapter was trained by a
    recipe, quantized or not.

    Raises:
        BackboneError: it cannot be loaded.
    """
    manifest = read_manifest(files)
    trained = {} if dtype else manifest.training.get("recipe", {})
    return load_backbone(
        backbone or _backbone_of_run(files.parent) or manifest.backbone.id,
        task=_task_of(manifest).head,
        labels=manifest.labels,
        revision=None if backbone else manifest.backbone.revision,
        dtype=dtype or trained.get("dtype"),
        quantize=trained.get("quantize"),
    )


def _task_of(manifest: Manifest) -> Task:
    """The task, with the options that the adapter was trained with."""
    known = manifest.training.get("recipe", {}).get("task")
    return task_of(known or manifest.task or "classification")


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


def _backbone_of_run(folder: Path) -> str | None:
    """The backbone of the recipe beside an adapter, if that is a folder on this machine."""
    if not (folder / "recipe.yaml").is_file():
        return None
    backbone = str(load_yaml(folder / "recipe.yaml").get("backbone", ""))
    return backbone if Path(backbone).is_dir() else None


@dataclass(frozen=True)
class Trained:
    """What an adapter was trained on: the task and the data options, as defaults for new data."""

    task: Task
    data: DataOptions


def trained(reference: str | Path) -> Trained:
    """What an adapter was trained on; no model is loaded."""
    manifest = read_manifest(pull(reference))
    known = manifest.training.get("recipe", {}).get("data", {})
    options = from_dict(DataOptions, {"text": "text", **known, "rows": None})
    return Trained(_task_of(manifest), options)

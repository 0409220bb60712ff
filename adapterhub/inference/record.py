"""The training record of an adapter: the settings of its run that apply to new data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from adapterhub.config.options import from_dict, is_neutral, options_of
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, FileError
from adapterhub.files.manifest import Manifest, with_head
from adapterhub.files.native import Saved
from adapterhub.recipe.recipe import DATA_SOURCES
from adapterhub.registry.pull import pull
from adapterhub.tasks import TASKS, Task, parse_task

FEATURES, EMBEDDING = "features", "embedding"  # without a head, `predict` returns vectors
# The longest input if no run records one: long prompts are read whole, but not a book.
LONGEST_UNRECORDED = 2_048
_OLD_DEFAULT = 128  # for runs without a recorded number
_COLUMNS = {option.name for option in options_of(DataOptions)}


@dataclass(frozen=True)
class TrainingRecord:
    """The training of an adapter: its task, and the defaults for new data."""

    task: Task
    data: DataOptions
    max_length: int = LONGEST_UNRECORDED
    seed: int = 0
    kind: str = ""  # the kind of model, a key of `TASK_MODELS`


@dataclass(frozen=True)
class _RecordedOptions:
    data: DataOptions
    max_length: int
    seed: int

    def __post_init__(self) -> None:
        if self.max_length < 1 or self.seed < 0:
            raise ConfigError(
                f"max_length is {self.max_length}, seed is {self.seed}",
                expected="a length of 1 or more, a seed of 0 or more",
            )


def read_training_record(
    reference: str | Path,
    registry: str | Path | None = None,
    head: str | None = None,
    task: str | None = None,
) -> TrainingRecord:
    """Read the training record of an adapter, without loading a model.

    Raises:
        ConfigError: the adapter has several heads and none is named, or the named head does not
            exist; or as in `training_record`.
        FileError: the adapter is missing, or its files or its training record are broken.
    """
    manifest = Saved.at(pull(reference, registry=registry)).manifest
    return training_record(with_head(manifest, head), task)


def training_record(manifest: Manifest, task: str | None = None) -> TrainingRecord:
    """Extract the training record from a manifest.

    The manifest may be untrusted: columns and formats are taken from it, but not paths or names of
    data. Options of a later version that are null, false or empty change nothing.

    `task` is for an adapter without a recorded task; otherwise it replaces the recorded one and
    must need the same kind of model.

    Raises:
        ConfigError: the task is neither recorded nor passed in, or needs another kind of model.
        FileError: the record is broken.
    """
    try:
        recipe = _mapping(manifest.training, "recipe")
        data, train = _mapping(recipe, "data"), _mapping(recipe, "train")
        usual = _OLD_DEFAULT if train else LONGEST_UNRECORDED
        length = train.get("max_length")
        options = from_dict(
            _RecordedOptions,
            {
                "data": {k: v for k, v in data.items() if _is_read(k, v)},
                "max_length": usual if length is None else length,
                "seed": manifest.training.get("seed", 0),
            },
        )
        of_head = manifest.head.kind if manifest.head else None
        recorded = _parsed(recipe.get("task") or manifest.task or of_head)
        if recorded and isinstance(recipe.get("task"), Mapping):
            recorded = recorded[0].recorded(), recorded[1]
    except ConfigError as error:
        raise FileError(
            f"the training record of {manifest.name!r} cannot be used",
            offenders=[error.problem, *error.offenders],
            expected="the record of a run of this or an older version of adapterhub",
        ) from error
    requested = _parsed(task)
    chosen, _ = requested or recorded or _no_task(manifest)
    known, kind = recorded or requested or _no_task(manifest)
    if chosen.head != known.head:
        raise ConfigError(
            f"{manifest.name!r} was trained on a model for {kind}, not for {chosen.name}",
            expected=f"--task {kind}, or no --task",
        )
    return TrainingRecord(chosen, options.data, options.max_length, options.seed, kind)


def task_and_kind(spec: object) -> tuple[Task, str]:
    """Return the task of a spec and its kind of model; without a head, the task of vectors.

    Raises:
        ConfigError: the task or an option is unknown.
    """
    task = parse_task(EMBEDDING if spec == FEATURES else spec)
    return task, FEATURES if spec == FEATURES else task.head


def _parsed(spec: object) -> tuple[Task, str] | None:
    return task_and_kind(spec) if spec else None


def _no_task(manifest: Manifest) -> NoReturn:
    raise ConfigError(
        f"{manifest.name!r} does not record what kind of model it was trained on",
        expected=f"a task, one of {', '.join(TASKS)}",
        hint='--task causal-lm, or task="causal-lm" in Python',
    )


def _is_read(name: str, value: object) -> bool:
    """Return whether a data option is taken from a record; paths and unset unknown ones are not."""
    known = name in _COLUMNS
    dropped = name in (*DATA_SOURCES, "rows", "eval_rows")
    return not dropped and (known or not is_neutral(value))


def _mapping(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = parent.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is not a mapping")
    return value

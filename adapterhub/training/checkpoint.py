"""Training checkpoints that survive a kill at any moment.

    <output>/checkpoints/last/   state of the run, for an exact resume
    <output>/checkpoints/best/   tensors at the best evaluation

A checkpoint is a folder: `tensors.safetensors`, `progress.json` and, in `last`, `training.pt`
(optimizer, schedule and random states; read with `weights_only=True`). Folders are replaced
atomically (files/atomic.py): a kill leaves the old checkpoint or the new one.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from adapterhub.errors import ConfigError, FileError, OutputError
from adapterhub.files.atomic import put_in_place, restore_old, staging, sync_files

FORMAT = 1
TENSORS, TRAINING, PROGRESS = "tensors.safetensors", "training.pt", "progress.json"
BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, EOFError,
          pickle.UnpicklingError, SafetensorError)  # fmt: skip


@dataclass(frozen=True)
class State:
    """The content of a checkpoint: trained tensors, progress, run description, optimizer state.

    `training` may hold only tensors and plain containers, since it is read with
    `weights_only=True`.
    """

    tensors: Mapping[str, torch.Tensor]
    progress: dict[str, Any]
    run: dict[str, Any]
    training: dict[str, Any] | None = None


def folder_of(output: Path, name: str) -> Path:
    """Return the folder of the checkpoint `name` ("last" or "best") of the run in `output`."""
    return output / "checkpoints" / name


def exists(folder: Path) -> bool:
    """Check for a complete checkpoint, after undoing a replacement that was interrupted."""
    restore_old(folder)
    return (folder / PROGRESS).is_file()


def save(folder: Path, state: State) -> None:
    """Write a checkpoint atomically, replacing an older one.

    Raises:
        OutputError: the folder cannot be written; the older checkpoint is kept.
    """
    try:
        with staging(folder) as staged:
            _write(staged, state)
            put_in_place(staged, folder, overwrite=True)
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"the checkpoint {folder} could not be written: {error}",
            expected="a writable folder on a disk with free space",
            hint="free some space, then run the same command with --resume",
        ) from error


def load_checkpoint(folder: Path) -> State:
    """Read a checkpoint.

    Raises:
        FileError: the checkpoint is missing or broken.
    """
    if not exists(folder):
        raise FileError(f"there is no checkpoint in {folder}", hint="train without --resume")
    try:
        record = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        _check_format(folder, record)
        tensors = load_file(folder / TENSORS)
        training = _load_training(folder / TRAINING)
        return State(tensors, record["progress"], record["run"], training)
    except BROKEN as error:
        raise FileError(
            f"the checkpoint {folder} is broken: {error}",
            hint="delete that folder and train again",
        ) from error


def copy_tensors(live: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Copy `saved` into the `live` tensors, in place, on their device.

    Raises:
        FileError: names or shapes differ; every missing, unexpected or wrong-shape tensor is
            listed, and nothing is copied.
    """
    offenders = list(_mismatches(live, saved))
    if offenders:
        raise FileError(
            "the tensors of the checkpoint do not match those of this run",
            offenders=offenders,
            hint="resume with the method and backbone that the run was started with",
        )
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(saved[name])


def run_digest(run: Mapping[str, Any]) -> str:
    """Return the identity of a run: the sha256 of its description as canonical JSON."""
    return hashlib.sha256(_json(run).encode()).hexdigest()


def check_same_run(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to resume a run from a checkpoint of another run.

    Raises:
        ConfigError: the two run descriptions differ; every differing setting is listed.
    """
    if run_digest(saved) == run_digest(current):
        return
    before, now = dict(_leaves(saved)), dict(_leaves(current))
    differing = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
    raise ConfigError(
        "the checkpoint belongs to another run: some settings or the data are different",
        expected="the same recipe and data as when the run was started",
        hint="restore them, or train without --resume into another output folder",
        offenders=[
            f"{k}: {before.get(k, 'nothing')} in the checkpoint, {now.get(k, 'nothing')} now"
            for k in differing
        ],
    )


def random_state() -> dict[str, Any]:
    """Return the states of the Python, numpy and torch (CPU and CUDA) random generators."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.array(keys)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the random generators to a state that `random_state` returned."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def _write(folder: Path, state: State) -> None:
    # Copies, because safetensors refuses tied tensors and views.
    tensors = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in state.tensors.items()}
    save_file(tensors, folder / TENSORS)
    if state.training is not None:
        torch.save(state.training, folder / TRAINING)
    record = {
        "format": FORMAT,
        "digest": run_digest(state.run),
        "run": json.loads(_json(state.run)),
        "progress": state.progress,
    }
    text = json.dumps(record, indent=1, sort_keys=True) + "\n"
    (folder / PROGRESS).write_text(text, encoding="utf-8")
    sync_files(folder)


def _load_training(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        training: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types on broken bytes
        raise ValueError(f"{path.name}: {type(error).__name__}: {error}") from error
    return training


def _check_format(folder: Path, record: Mapping[str, Any]) -> None:
    if record["format"] != FORMAT:
        raise FileError(
            f"the checkpoint {folder} has format {record['format']}",
            expected=f"format {FORMAT}",
            hint="resume with the version of adapterhub that wrote it",
        )


def _mismatches(
    live: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    for name in sorted(live.keys() | saved.keys()):
        if name not in saved:
            yield f"{name}: missing in the checkpoint"
        elif name not in live:
            yield f"{name}: only in the checkpoint"
        elif live[name].shape != saved[name].shape:
            yield f"{name}: {tuple(saved[name].shape)} saved, {tuple(live[name].shape)} here"


def _json(run: Mapping[str, Any]) -> str:
    return json.dumps(run, sort_keys=True, default=str)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each setting as (dotted path, JSON text)."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, json.dumps(value, sort_keys=True, default=str)

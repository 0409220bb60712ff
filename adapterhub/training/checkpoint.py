"""Training checkpoints that survive a kill at any moment.

    <output>/checkpoints/last/   state of the run: what an exact resume needs
    <output>/checkpoints/best/   tensors at the best evaluation

A checkpoint is a folder: `tensors.safetensors`, `progress.json` and, in `last`, `training.pt`
(optimizer, schedule, random states; read with `weights_only=True`). It is written as a hidden
sibling, flushed to disk, and swapped in by two renames; a kill between them is healed by the next
`load_checkpoint` or `save`.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from adapterhub.errors import ConfigError, FileError, OutputError

FORMAT = 1
TENSORS, TRAINING, PROGRESS = "tensors.safetensors", "training.pt", "progress.json"
BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, EOFError,
          pickle.UnpicklingError, SafetensorError)  # fmt: skip


@dataclass(frozen=True)
class State:
    """One checkpoint: trained tensors, where the run is, what the run is, and optimizer state.

    `training` holds tensors and plain containers only, since it is read with `weights_only=True`.
    """

    tensors: Mapping[str, torch.Tensor]
    progress: dict[str, Any]
    run: dict[str, Any]
    training: dict[str, Any] | None = None


def folder_of(output: Path, name: str) -> Path:
    """Where the checkpoint `name` ("last" or "best") of the run in `output` is."""
    return output / "checkpoints" / name


def delete_checkpoints(output: Path) -> None:
    """Deletes all checkpoints of the run in `output`."""
    shutil.rmtree(output / "checkpoints", ignore_errors=True)


def exists(folder: Path) -> bool:
    """Whether a whole checkpoint is there; heals a swap that was cut off."""
    _heal(folder)
    return (folder / PROGRESS).is_file()


def save(folder: Path, state: State) -> None:
    """Writes the checkpoint, replacing an older one; a kill leaves the old one or the new one.

    Raises `OutputError` when the folder cannot be written; the older checkpoint then stays.
    """
    new = _sibling(folder, "new")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _heal(folder)
        _write(new, state)
        _swap(new, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        raise OutputError(
            f"the checkpoint {folder} could not be written: {error}",
            expected="a writable folder on a disk with room",
            hint="free some space, then run the same command with --resume",
        ) from error


def load_checkpoint(folder: Path) -> State:
    """Reads a checkpoint. Raises `FileError` when it is missing or broken."""
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
    """Copies `saved` into the `live` tensors, in place, on their own device.

    Raises `FileError` that lists every missing, unexpected or wrong-shape tensor.
    """
    offenders = list(_mismatches(live, saved))
    if offenders:
        raise FileError(
            "the tensors of the checkpoint are not those of this run",
            offenders=offenders,
            hint="resume with the method and backbone that the run was started with",
        )
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(saved[name])


def run_digest(run: Mapping[str, Any]) -> str:
    """The identity of a run: sha256 of its description (recipe, data hash) as canonical JSON."""
    return hashlib.sha256(_json(run).encode()).hexdigest()


def check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises `ConfigError` that lists every setting in which the two run descriptions differ."""
    if run_digest(saved) == run_digest(now):
        return
    before, after = dict(_leaves(saved)), dict(_leaves(now))
    keys = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
    raise ConfigError(
        "the checkpoint belongs to another run: some settings or the data are different",
        expected="the same recipe and data as when the run was started",
        hint="set them back, or train without --resume into another output folder",
        offenders=[
            f"{k}: {before.get(k, 'nothing')} in the checkpoint, {after.get(k, 'nothing')} now"
            for k in keys
        ],
    )


def random_state() -> dict[str, Any]:
    """The states of the python, numpy and torch (CPU and CUDA) random generators."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.array(keys)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Puts back what `random_state` returned."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def _write(new: Path, state: State) -> None:
    new.mkdir()
    # A copy of each: safetensors refuses tied tensors and views.
    tensors = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in state.tensors.items()}
    save_file(tensors, new / TENSORS)
    if state.training is not None:
        torch.save(state.training, new / TRAINING)
    record = {
        "format": FORMAT,
        "digest": run_digest(state.run),
        "run": json.loads(_json(state.run)),
        "progress": state.progress,
    }
    text = json.dumps(record, indent=1, sort_keys=True) + "\n"
    (new / PROGRESS).write_text(text, encoding="utf-8")
    for path in (*sorted(new.iterdir()), new):
        _flush(path)


def _swap(new: Path, folder: Path) -> None:
    old = _sibling(folder, "old")
    if folder.exists():
        os.rename(folder, old)
    os.rename(new, folder)
    _flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _heal(folder: Path) -> None:
    """Undoes a swap that was cut off between its renames, and removes what a kill left."""
    old = _sibling(folder, "old")
    if old.exists() and not folder.exists():
        os.rename(old, folder)
    for rest in (old, _sibling(folder, "new")):
        if rest.exists():
            shutil.rmtree(rest)


def _sibling(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}.{suffix}")


def _flush(path: Path) -> None:
    """Makes a file or folder survive a power cut. Windows cannot open a folder: files only."""
    if path.is_dir() and os.name == "nt":
        return
    number = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _load_training(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's reader raises any kind on broken bytes
        raise ValueError(f"{path.name}: {type(error).__name__}: {error}") from error
    return content


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
    """Each setting as (dotted path, JSON text)."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, json.dumps(value, sort_keys=True, default=str)

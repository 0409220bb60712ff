"""Training checkpoints that survive a kill at any moment.

    <output>/checkpoints/last/   state of the run, for an exact resume
    <output>/checkpoints/best/   tensors at the best evaluation

A checkpoint is a folder: `tensors.safetensors`, `progress.json` and, in `last`, `training.pt`
(optimizer, schedule and random states; read with `weights_only=True`). Folders are replaced
atomically (files/atomic.py): a kill leaves the old checkpoint or the new one.

The checkpoint of an adapter is also an adapter folder, for all commands that take one: its files
are in `adapter`. `tensors.safetensors` then contains only the additional tensors that training
needs.

With sharded parameters, each process writes its part of the tensors and of the optimizer's state
(sharding.py) into the folder, which must be visible to all processes; the first one writes the
rest. Such a checkpoint can also be read by another number of processes, and by one with whole
tensors.

Any changed byte is detected. `progress.json` contains size and sha256 of the other files, and of
the reporters' files up to this checkpoint. Its field `sha256` is the digest of its canonical
bytes without that field. This protects against damage, not against forgery.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from adapterhub.anatomy.backbone import is_sharded, shared_like
from adapterhub.backbones.checkpoint import BROKEN as BROKEN_WEIGHTS
from adapterhub.errors import FileError
from adapterhub.files.atomic import (
    FileDigest,
    UnreadableError,
    file_digest,
    put_in_place,
    read_file,
    restore_old,
    staging,
    sync_files,
)
from adapterhub.files.native import TENSORS_FILE, is_same_tensor
from adapterhub.loop.processes import (
    everyone_s,
    from_main,
    is_main,
    process_count,
    process_index,
    wait_for_everyone,
)
from adapterhub.loop.sharding import (
    OF_TENSORS,
    described,
    has_shards,
    join_training,
    read_shards,
    split_training,
    write_shards,
)
from adapterhub.recipe.output_folder import writing

FORMAT = 3  # 1 lacked digests, 2 lacked the adapter
MAX_PROGRESS_BYTES = 256 << 20  # the metrics of a million evaluations
TENSORS, TRAINING, PROGRESS = "tensors.safetensors", "training.pt", "progress.json"
ADAPTER = "adapter"  # searched by `find_adapter`
BROKEN = (*BROKEN_WEIGHTS, UnreadableError)
_NEUTRAL = (None, "null", "false")  # values of new options that change nothing


@dataclass(frozen=True)
class State:
    """The content of a checkpoint: trained tensors, progress, run description, optimizer state.

    `training` may contain only tensors and plain containers, since it is read with
    `weights_only=True`. `reports` contains the digest of each reporter's file, up to this
    checkpoint. `shards` is the folder of the tensors if they are sharded: `restore` and
    `restored_training` read them from there. `save_adapter` writes the folder of an adapter.
    """

    tensors: Mapping[str, torch.Tensor]
    progress: dict[str, Any]
    run: dict[str, Any]
    training: dict[str, Any] | None = None
    reports: Mapping[str, FileDigest] = field(default_factory=dict)
    shards: Path | None = None
    save_adapter: Callable[[Path], object] | None = None


def folder_of(output: Path, name: str) -> Path:
    """Return the folder of the checkpoint `name` ("last" or "best") of the run in `output`."""
    return output / "checkpoints" / name


def exists(folder: Path) -> bool:
    """Check whether a checkpoint exists, even incomplete; undo an interrupted replacement."""
    restore_old(folder)
    return os.path.lexists(folder)


def save(folder: Path, state: State) -> None:
    """Write a checkpoint atomically, replacing an older one.

    All processes must call this. The first one writes; if the tensors are sharded, each writes its
    part.

    Raises:
        OutputError: the folder cannot be written; the older checkpoint is kept.
    """
    if any(map(is_sharded, state.tensors.values())):
        with writing(folder):
            _save_shards(folder, state)
    elif is_main():
        with writing(folder), staging(folder) as staged:
            stored: set[str] = set()
            if state.save_adapter is not None:
                state.save_adapter(staged / ADAPTER)  # a new folder
                stored = _stored(staged / ADAPTER / TENSORS_FILE, state.tensors)
            others = {n: t for n, t in state.tensors.items() if n not in stored}
            _write_tensors(staged / TENSORS, others)
            _write(staged, state, stored=stored)
            put_in_place(staged, folder, overwrite=True)
    wait_for_everyone()


def _save_shards(folder: Path, state: State) -> None:
    """Write a checkpoint of sharded tensors: each process its part, the first one the rest."""
    training, kept = split_training(state.training)
    tensors = {f"{OF_TENSORS}{name}": tensor for name, tensor in state.tensors.items()}
    with staging(folder) if is_main() else nullcontext(folder) as own:
        staged = Path(from_main(str(own)))
        written = write_shards(staged, tensors | kept)
        digests = {path.name: asdict(file_digest(path)) for path in written}
        digests = {name: each for part in everyone_s(digests) for name, each in part.items()}
        if is_main():
            _write(staged, replace(state, training=training), digests)
            put_in_place(staged, folder, overwrite=True)
        wait_for_everyone()


def load_checkpoint(folder: Path) -> State:
    """Read a checkpoint, after comparing every byte of its files with the digests.

    Raises:
        FileError: the checkpoint is missing, broken or altered; the error names the file.
    """
    if not exists(folder):
        raise FileError(f"no checkpoint in {folder}", hint="train without --resume")
    name = PROGRESS
    try:
        record = _read_record(folder)
        sharded = TENSORS not in record["files"] and has_shards(folder)
        for name, expected in _checked_here(record["files"], sharded):
            _check_digest(folder / name, FileDigest(**expected))
        name = TENSORS
        tensors = {} if sharded else load_file(folder / TENSORS)
        if stored := record["stored"]:
            adapter = load_file(folder / ADAPTER / TENSORS_FILE)
            tensors |= {each: adapter[each] for each in stored}
        name = TRAINING
        training = _load_training(folder / TRAINING) if TRAINING in record["files"] else None
        reports = {n: FileDigest(**digest) for n, digest in record["reports"].items()}
        shards = folder if sharded else None
        return State(tensors, record["progress"], record["run"], training, reports, shards)
    except BROKEN as error:
        raise broken(folder, f"{name}: {error}") from error


def broken(folder: Path, problem: str) -> FileError:
    """Build the error for an unusable checkpoint, for the caller to raise."""
    return FileError(
        f"the checkpoint {folder} is broken: {problem}",
        expected="the files exactly as they were written",
        hint="copy them again from a backup, or train again into another output folder",
    )


def _checked_here(files: Mapping[str, Any], sharded: bool) -> list[tuple[str, Any]]:
    """Return the files that this process checks; for shards, those that it would write."""
    if not sharded:
        return list(files.items())
    rank, count = process_index(), process_count()
    return [entry for i, entry in enumerate(sorted(files.items())) if i % count == rank]


def restore(live: Mapping[str, torch.Tensor], state: State) -> None:
    """Copy the tensors of a checkpoint into the `live` ones, in place.

    Either may be sharded. If the checkpoint is sharded, all processes must call this together.

    Raises:
        FileError: names, shapes or dtypes differ, or a file is broken; every tensor that differs is
            listed, and nothing is copied.
    """
    if state.shards is None:
        _check_tensors(live, state.tensors)
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(shared_like(tensor, state.tensors[name]))
        return
    prefix = OF_TENSORS
    saved = described(state.shards)
    _check_tensors(live, {n.removeprefix(prefix): saved[n] for n in saved if n.startswith(prefix)})
    try:
        read_shards(state.shards, {f"{prefix}{name}": t.detach() for name, t in live.items()})
    except (ValueError, OSError) as error:
        raise broken(state.shards, str(error)) from error


def restored_training(state: State, params: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the training state of a checkpoint, with the optimizer's state of `params`.

    Raises:
        ValueError: the checkpoint has no training state, or a file is broken.
    """
    if state.training is None:
        raise ValueError(f"it has no {TRAINING}")
    if state.shards is None:
        return state.training
    return join_training(state.training, state.shards, params)


def _check_tensors(live: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Check that saved tensors have the names, shapes and dtypes of the live ones."""
    if offenders := list(_mismatches(live, saved)):
        raise FileError(
            "the tensors of the checkpoint do not match this run's",
            offenders=offenders,
            hint="resume with the method and backbone that the run was started with",
        )


def same_record(saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Compare as JSON: NaN equals NaN, and null or false equals a value that is missing."""
    return not differing_settings(saved, current)


def random_state() -> dict[str, Any]:
    """Return the states of the Python, numpy and torch (CPU and CUDA) random generators."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.array(keys)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def random_states(world: int) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the random state of this process or, if `world` is not 1, of all processes."""
    if world == 1:
        return random_state()
    buffer = io.BytesIO()  # objects sent to other processes must not contain tensors
    torch.save(random_state(), buffer)
    sent = everyone_s(buffer.getvalue())
    return [torch.load(io.BytesIO(each), weights_only=True) for each in sent]


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the random generators to a state that `random_state` returned."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    # Copies, because safetensors refuses tied tensors and views.
    copies = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in tensors.items()}
    try:
        save_file(copies, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _stored(file: Path, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of the tensors that an adapter's file contains, to the byte."""
    saved = load_file(file)
    return {n for n, tensor in tensors.items() if n in saved and is_same_tensor(saved[n], tensor)}


def _write(
    folder: Path,
    state: State,
    digests: Mapping[str, Any] = MappingProxyType({}),
    stored: Iterable[str] = (),
) -> None:
    """Write everything except tensors, and the record.

    `digests` belong to existing files; `stored` names the tensors in the adapter's file.
    """
    if state.training is not None:
        _write_training(folder / TRAINING, state.training)
    record = {
        "format": FORMAT,
        "run": state.run,
        "progress": state.progress,
        "files": {
            name: digests.get(name) or asdict(file_digest(folder / name))
            for name in sorted(p.relative_to(folder).as_posix() for p in _files(folder))
        },
        "stored": sorted(stored),
        "reports": {name: asdict(digest) for name, digest in state.reports.items()},
    }
    (folder / PROGRESS).write_bytes(_record_bytes(record))
    sync_files(folder)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _write_training(path: Path, training: dict[str, Any]) -> None:
    with open(path, "wb") as file:
        try:
            torch.save(training, file)
        except RuntimeError as error:  # torch's conversion of an error of `file.write`
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _record_bytes(record: Mapping[str, Any]) -> bytes:
    """Serialize the record of `progress.json`, with the digest of its content."""
    content = json.loads(_json(record))
    digest = hashlib.sha256(_json(content).encode()).hexdigest()
    return (json.dumps({**content, "sha256": digest}, indent=1, sort_keys=True) + "\n").encode()


def _read_record(folder: Path) -> dict[str, Any]:
    """Read `progress.json`, whose bytes must equal the serialization of its content."""
    data = read_file(folder / PROGRESS, 0, MAX_PROGRESS_BYTES, None)
    record: dict[str, Any] = json.loads(data)
    if record["format"] != FORMAT:
        raise FileError(
            f"{folder / PROGRESS} has format {record['format']}",
            expected=f"format {FORMAT}",
            hint="resume with the version of adapterhub that wrote it, or train again into another "
            "output folder",
        )
    content = {name: value for name, value in record.items() if name != "sha256"}
    if _record_bytes(content) != data:
        raise ValueError("it was altered after it was written")
    return content


def _check_digest(path: Path, expected: FileDigest) -> None:
    if not path.is_file() or path.stat().st_size != expected.size:
        raise ValueError(f"it is missing, or has not {expected.size} bytes")
    if file_digest(path) != expected:
        raise ValueError("its sha256 differs: it was altered after it was written")


def _load_training(path: Path) -> dict[str, Any]:
    try:
        training: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types on broken bytes
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return training


def _mismatches(
    live: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    for name in sorted(live.keys() | saved.keys()):
        if name not in saved:
            yield f"{name}: missing in the checkpoint"
        elif name not in live:
            yield f"{name}: only in the checkpoint"
        elif (was := _kind(saved[name])) != (now := _kind(live[name])):
            yield f"{name}: {was} saved, {now} here"


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _json(run: Mapping[str, Any]) -> str:
    return json.dumps(run, sort_keys=True, default=str)


def differing_settings(
    saved: Mapping[str, Any], current: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
    """Return the settings that differ, by dotted path: both values as JSON text."""
    before, now = dict(_leaves(saved)), dict(_leaves(current))
    return {
        name: (before.get(name, "nothing"), now.get(name, "nothing"))
        for name in before.keys() | now.keys()
        if not _same(before.get(name), now.get(name))
    }


def _same(before: str | None, now: str | None) -> bool:
    """Return whether two settings are equal; None: the version lacked the setting."""
    if before is None or now is None:
        return before in _NEUTRAL and now in _NEUTRAL
    return before == now


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each setting as (dotted path, JSON text)."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, json.dumps(value, sort_keys=True, default=str)

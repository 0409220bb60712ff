"""Files of sharded tensors: each process writes what it holds, and any number of them reads it.

    <folder>/shard-<process>-model-<n>-of-<N>.safetensors

torch.distributed.checkpoint writes and reads them, with the place of each part in its whole tensor
in the header of a file. A process reads the parts that it needs, sharded or whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

TENSORS, OPTIMIZER = "tensors/", "optimizer/"  # the first parts of the names of what is written


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> list[Path]:
    """Write tensors, of which this process may hold only a part; return the files that it wrote.

    All processes must call this together, with the same names, for a folder that they share.

    Raises:
        OSError: a process cannot write its part.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        raise _first_os_error(error) from error
    return sorted(folder.glob(f"shard-{dist.get_rank() + 1:05d}-*.safetensors"))


def has_shards(folder: Path) -> bool:
    """Return whether a folder has files of sharded tensors."""
    return any(folder.glob("shard-*.safetensors"))


def described(folder: Path) -> dict[str, Tensor]:
    """Return tensors on the meta device with the shapes and dtypes of those in a folder."""
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_shards(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Read tensors into those given, in place: whole ones, or the part that this process holds.

    With several processes, all must call this together.

    Raises:
        ValueError: a tensor is missing, or a file cannot be read.
    """
    state: dict[str, Any] = dict(into)
    reader = HuggingFaceStorageReader(str(folder))
    try:
        with warnings.catch_warnings():  # that there is one process, where there is one
            warnings.simplefilter("ignore", UserWarning)
            load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise ValueError(str(error)) from error


def split_training(
    training: dict[str, Any] | None,
) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Return a training state without the tensors that the optimizer keeps, and these by name."""
    if training is None:
        return None, {}
    engine = training["engine"]
    kept = engine["optimizer"]["state"]
    tensors = {
        f"{OPTIMIZER}{number}/{name}": value
        for number, values in kept.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }
    rest = {
        number: {name: v for name, v in values.items() if not isinstance(v, Tensor)}
        for number, values in kept.items()
    }
    optimizer = {**engine["optimizer"], "state": rest}
    return {**training, "engine": {**engine, "optimizer": optimizer}}, tensors


def join_training(
    training: dict[str, Any], folder: Path, params: Sequence[Tensor]
) -> dict[str, Any]:
    """Return a training state with the tensors that `split_training` took out of it.

    What has the shape of its parameter is sharded as that is.
    """
    into = {
        name: _place_for(tensor, params[int(name.split("/")[1])])
        for name, tensor in described(folder).items()
        if name.startswith(OPTIMIZER)
    }
    read_shards(folder, into)
    optimizer = training["engine"]["optimizer"]
    state = {number: dict(values) for number, values in optimizer["state"].items()}
    for name, tensor in into.items():
        _, number, field = name.split("/")
        state[int(number)][field] = tensor
    engine = {**training["engine"], "optimizer": {**optimizer, "state": state}}
    return {**training, "engine": engine}


def _place_for(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return zeros to read a tensor of a parameter's state into."""
    if tensor.shape == parameter.shape:
        return torch.zeros_like(parameter.detach(), dtype=tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _first_os_error(error: CheckpointException) -> OSError:
    """Return why a process could not write; the first reason, if several could not."""
    reasons = (pair[0] for pair in error.failures.values())
    found = [reason for reason in reasons if isinstance(reason, OSError)]
    return found[0] if found else OSError(str(error))

"""The tensors of a checkpoint on disk, of which parts are read without loading a model.

safetensors, whole or in shards: a header says where each tensor's bytes are. Older torch files are
mapped into memory, and unpickled with `weights_only`: nothing in them is executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from adapterhub.errors import BackboneError

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
_NAMES = ("model.safetensors", "pytorch_model.bin")  # in the order in which transformers looks
_MAX_HEADER_BYTES = 100 << 20

Runs = Sequence[tuple[int, int]]  # (first value, number of values), in a tensor laid out flat


class Stored(NamedTuple):
    """A tensor in a file: `read` gives the values of some runs, one after the other."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[Runs], Tensor]


def stored_tensors(folder: Path) -> Iterator[Stored]:
    """The tensors of the checkpoint in a folder, file by file; one is read before the next comes.

    Raises:
        BackboneError: there is no checkpoint, or one of its files is broken.
    """
    for file in weight_files(folder):
        try:
            if file.suffix == ".safetensors":
                with open(file, "rb") as handle:
                    yield from _in_safetensors(handle)
            else:
                yield from _in_torch_file(file)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise _broken(file, error) from error


def _broken(file: object, why: object) -> BackboneError:
    return BackboneError(
        f"{file} cannot be read: {why}",
        expected="a checkpoint of transformers, complete",
        hint="download it again",
    )


def weight_files(folder: Path) -> list[Path]:
    """The files of a checkpoint, as transformers chooses them.

    Raises:
        BackboneError: there are none.
    """
    for name in _NAMES:
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}.index.json").is_file():
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return [folder / Path(shard).name for shard in sorted(set(shards))]
    raise BackboneError(
        f"{folder} holds no weights", expected=f"{' or '.join(_NAMES)}, or their shards"
    )


def _in_safetensors(handle: BinaryIO) -> Iterator[Stored]:
    length = int.from_bytes(handle.read(8), "little")
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    header: dict[str, Any] = json.loads(handle.read(length))
    header.pop("__metadata__", None)
    end = max((info["data_offsets"][1] for info in header.values()), default=0)
    if os.fstat(handle.fileno()).st_size < 8 + length + end:
        raise ValueError("it is truncated")
    for name, info in header.items():
        dtype, first = _DTYPES[info["dtype"]], 8 + length + info["data_offsets"][0]

        def read(runs: Runs, dtype: torch.dtype = dtype, first: int = first) -> Tensor:
            return _values(handle, first, dtype, runs)

        yield Stored(name, tuple(info["shape"]), read)


def _values(handle: BinaryIO, first: int, dtype: torch.dtype, runs: Runs) -> Tensor:
    data = bytearray()
    for start, count in runs:
        handle.seek(first + start * dtype.itemsize)
        data += handle.read(count * dtype.itemsize)
    if len(data) != sum(count for _, count in runs) * dtype.itemsize:
        raise _broken(handle.name, "a tensor is shorter than its shape")
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _in_torch_file(file: Path) -> Iterator[Stored]:
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    try:
        tensors = torch.load(file, mmap=True, **options)
    except RuntimeError:  # the format before torch 1.6 cannot be mapped
        tensors = torch.load(file, **options)
    for name, tensor in tensors.items():
        yield Stored(name, tuple(tensor.shape), partial(pick, tensor))


def pick(tensor: Tensor, runs: Runs) -> Tensor:
    """The values of some runs of a tensor, one after the other."""
    flat = tensor.detach().reshape(-1)
    return torch.cat([flat[start : start + count] for start, count in runs])

"""Read parts of a checkpoint's tensors from disk without loading a model.

Supports safetensors, in one file or in shards: a header has the offsets of each tensor's bytes.

Older torch files are pickles. They are mapped into memory and read with `weights_only`, which
restricts what the pickle may call. Its tensors are views of storages, so a few bytes can describe
10^12 values; and a zip file's records may be compressed, which torch never writes: both are
refused.
"""

from __future__ import annotations

import json
import os
import pickle
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from adapterhub.errors import BackboneError

BROKEN = (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, EOFError,
          RuntimeError, ImportError, pickle.UnpicklingError, SafetensorError)  # fmt: skip
"""What libraries raise that load a broken checkpoint: they have no common error."""

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"F8_E8M0": torch.float8_e8m0fnu},
    **{"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
}
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
_NAMES = (
    "model.safetensors",
    "pytorch_model.bin",
)  # in the order that transformers tries
_MAX_HEADER_BYTES = 100 << 20

Runs = Sequence[tuple[int, int]]  # (first value, number of values) in the flattened tensor


class StoredTensor(NamedTuple):
    """A tensor in a file; `read` returns the values of runs, concatenated."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[Runs], Tensor]

    def holds_codes(self) -> bool:
        """Return whether the values are codes of 8 bits, which need a scale."""
        return 0 not in self.shape and self.read([(0, 1)]).dtype in _CODES


@contextmanager
def opened_tensors(file: Path) -> Iterator[list[StoredTensor]]:
    """Open a weight file; its tensors can be read inside, by several threads.

    Raises:
        BackboneError: the file is broken.
    """
    try:
        if file.suffix == ".safetensors":
            with open(file, "rb") as handle:
                yield _in_safetensors(handle)
        else:
            yield _in_torch_file(file)
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, AttributeError) as error:
        raise _broken(file, error) from error


def _broken(file: object, reason: object) -> BackboneError:
    return BackboneError(
        f"{file} cannot be read: {reason}",
        expected="a complete transformers checkpoint",
        hint="download it again",
    )


def weight_files(folder: Path) -> list[Path]:
    """List the weight files of a checkpoint, in the order of preference of transformers.

    Raises:
        BackboneError: there are none, or the index of the shards is broken.
    """
    for name in _NAMES:
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}.index.json").is_file():
            return [folder / Path(shard).name for shard in _shards(index)]
    raise BackboneError(
        f"{folder} contains no weights", expected=f"{' or '.join(_NAMES)}, or their shards"
    )


def _shards(index: Path) -> list[str]:
    """Return the names of the shards in an index, sorted."""
    try:
        with open(index, "rb") as handle:
            data = handle.read(_MAX_HEADER_BYTES + 1)
        if len(data) > _MAX_HEADER_BYTES:
            raise ValueError(f"it has more than {_MAX_HEADER_BYTES} bytes")
        return sorted({str(shard) for shard in json.loads(data)["weight_map"].values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _broken(index, error) from error


def _in_safetensors(handle: BinaryIO) -> list[StoredTensor]:
    length = int.from_bytes(handle.read(8), "little")
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"its header would have {length} bytes")
    header: dict[str, Any] = json.loads(handle.read(length))
    header.pop("__metadata__", None)
    end = max((info["data_offsets"][1] for info in header.values()), default=0)
    if os.fstat(handle.fileno()).st_size < 8 + length + end:
        raise ValueError("it is truncated")
    tensors, read_at = [], _reader(handle)
    for name, info in header.items():
        first = 8 + length + info["data_offsets"][0]
        read = partial(_values, read_at, name, first, _DTYPES[info["dtype"]])
        tensors.append(StoredTensor(name, tuple(info["shape"]), read))
    return tensors


def _reader(handle: BinaryIO) -> Callable[[int, int], bytes]:
    """Return a function (offset, size) -> bytes that several threads may call."""
    if hasattr(os, "pread"):
        return lambda offset, size: os.pread(handle.fileno(), size, offset)
    lock = threading.Lock()

    def read_at(offset: int, size: int) -> bytes:
        with lock:
            handle.seek(offset)
            return handle.read(size)

    return read_at


def _values(
    read_at: Callable[[int, int], bytes], name: str, first: int, dtype: torch.dtype, runs: Runs
) -> Tensor:
    """Read runs of a tensor whose first value is at the offset `first`."""
    data = bytearray()
    for start, count in runs:
        data += read_at(first + start * dtype.itemsize, count * dtype.itemsize)
    if len(data) != sum(count for _, count in runs) * dtype.itemsize:
        raise _broken(name, "it is shorter than its shape")
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _in_torch_file(file: Path) -> list[StoredTensor]:
    return [
        StoredTensor(name, tuple(tensor.shape), partial(take_runs, tensor))
        for name, tensor in load_torch_file(file).items()
    ]


def take_runs(tensor: Tensor, runs: Runs) -> Tensor:
    """Return the values of runs of a tensor, concatenated."""
    flat = tensor.detach().reshape(-1)
    return torch.cat([flat[start : start + count] for start, count in runs])


_MOST_SHARING = 4  # tensors of one storage: a tied weight under each of its names


def load_torch_file(source: Path | BinaryIO) -> dict[str, Tensor]:
    """Load the tensors of a file by name; a file on disk is mapped into memory where it can be.

    Raises:
        ValueError: it is damaged, contains other objects than named tensors, or would expand.
        OSError: it cannot be read.
    """
    size = _size(source)
    _check_records(source, size)
    try:
        loaded = _load(source)
    except OSError:
        raise
    except Exception as error:  # any type; its message would advise to load with code execution
        raise ValueError(f"{type(error).__name__}: damaged, or not only tensors") from None
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in loaded.items()
    ):
        raise ValueError("not a mapping of names to tensors")
    _check_storages(loaded, size)
    return dict(loaded)


def _load(source: Path | BinaryIO) -> Any:
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    if not isinstance(source, Path):
        source.seek(0)
        return torch.load(source, **options)
    try:
        return torch.load(source, mmap=True, **options)
    except RuntimeError:  # the format before torch 1.6 cannot be mapped
        return torch.load(source, **options)


def _size(source: Path | BinaryIO) -> int:
    return source.stat().st_size if isinstance(source, Path) else source.seek(0, os.SEEK_END)


def _check_records(source: Path | BinaryIO, size: int) -> None:
    """Refuse records of torch's zip format that are compressed or overlap; torch writes neither."""
    if not zipfile.is_zipfile(source):
        return  # the format before torch 1.6 has no compression
    try:
        with zipfile.ZipFile(source) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"a damaged zip file: {error}") from None
    stored = all(record.compress_type == zipfile.ZIP_STORED for record in records)
    expanded = sum(record.file_size for record in records)
    if not stored or expanded > size:
        raise ValueError(f"its records expand to {expanded} bytes, from {size}")


def _check_storages(tensors: Mapping[str, Tensor], size: int) -> None:
    """Refuse tensors with more values than stored: views that repeat, sparse or meta tensors."""
    for name, tensor in tensors.items():
        plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.is_quantized:
            raise ValueError(f"{name!a} is no plain tensor")
        if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise ValueError(f"{name!a} has more values than are stored: {tensor.numel()}")
    total = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    if total > _MOST_SHARING * size:
        raise ValueError(f"its tensors have {total} bytes, from a file of {size}")

"""The tensors of the native format: conversion to and from bytes, and reading a file in pieces.

The format itself is described in `adapterhub.files.native`. A stranger's file may be as large as
its manifest states, so it is never in memory as a whole. All checks run without torch.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from adapterhub.errors import FileError, OutputError, one_line
from adapterhub.files.atomic import UnreadableError, check_sha256, open_regular, pieces_of
from adapterhub.files.manifest import (
    DTYPE_BYTES,
    MAX_HEADER_BYTES,
    Manifest,
    TensorInfo,
    size_problems,
    tensor_name_problems,
)
from adapterhub.files.schema import parse_object, shorten, show

if TYPE_CHECKING:
    import torch


TENSORS_FILE = "adapter.safetensors"
COPY_AGAIN = "copy or pull the adapter again; damaged files are not repaired"
_ENTRY = {"dtype", "shape", "data_offsets"}
# For each dtype that may be infinite: the integer dtype of its bits, and the exponent mask.
_EXPONENTS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}


class TensorFile:
    """The open tensor file of an adapter, with the sizes in its manifest and header.

    Attributes:
        infos: the tensors by name.
    """

    def __init__(self, folder: Path, manifest: Manifest, file: BinaryIO) -> None:
        self.infos = manifest.tensors
        self._folder, self._file = folder, file
        self._sha256 = manifest.files[TENSORS_FILE]
        self._size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(self._size - 8, MAX_HEADER_BYTES):
            claimed = f"the header claims {length} bytes, the file has {max(self._size - 8, 0)}"
            raise self.broken([claimed])
        self._first = 8 + length  # of the bytes of tensors
        self._offsets = self._read_header(file.read(length))

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the file in pieces; they are verified once the iteration ends.

        Raises:
            FileError: the digest differs from the manifest.
        """
        for _, piece in self._verified():
            yield piece

    def tensor_pieces(self) -> Iterator[tuple[str, bytes]]:
        """Yield each tensor's name with pieces of its bytes, as `pieces`."""
        return ((name, piece) for name, piece in self._verified() if name)

    def values(self, name: str, most: int) -> Iterator[bytes]:
        """Yield the bytes of a tensor, which are not compared with a digest."""
        self._file.seek(self._first + self._offsets[name])
        with self._readable():
            yield from pieces_of(self._file, self.infos[name].nbytes, most)

    def check(self) -> None:
        """Check the digest of the file, and that all values are finite.

        Raises:
            FileError: a check fails; the error lists every such tensor.
        """
        bad: Counter[str] = Counter()
        for name, piece in self.tensor_pieces():
            bad[name] += count_not_finite(self.infos[name].dtype, piece)
        self.refuse(bad)

    def refuse(self, bad: Mapping[str, int]) -> None:
        """Refuse tensors with non-finite values, given their counts by name.

        Raises:
            FileError: a count is positive.
        """
        lines = [
            not_finite(name, count, math.prod(self.infos[name].shape))
            for name, count in sorted(bad.items())
            if count
        ]
        if lines:
            raise self.broken(lines)

    def _verified(self) -> Iterator[tuple[str, bytes]]:
        """Yield the header, under the name "", and the tensors in their order; then check."""
        digest = hashlib.sha256()
        self._file.seek(0)
        order = sorted(self._offsets, key=self._offsets.__getitem__)
        parts = [("", self._first), *((name, self.infos[name].nbytes) for name in order)]
        with self._readable():
            for name, size in parts:
                for piece in pieces_of(self._file, size):
                    digest.update(piece)
                    yield name, piece
            check_sha256(digest.hexdigest(), self._sha256, self._size)

    def _read_header(self, data: bytes) -> dict[str, int]:
        """Return the start of each tensor, from a header that agrees with the manifest.

        Raises:
            FileError: the header differs; the error lists every difference.
        """
        header, problems = parse_object(data, len(data))
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or any(type(v) is not str for v in metadata.values()):
            problems.append("__metadata__ is not an object of texts")
        for name, entry in header.items():
            if not (isinstance(entry, dict) and entry.keys() == _ENTRY):
                problems.append(
                    f"{show(name)}: its fields must be exactly {', '.join(sorted(_ENTRY))}"
                )
        if problems := [f"header: {line}" for line in problems] or self._differences(header):
            raise self.broken(problems)
        offsets, end = {}, 0
        for name, entry in sorted(header.items(), key=lambda item: _begin(item[1])):
            offsets[name], begin = end, end
            end += self.infos[name].nbytes
            found = entry["data_offsets"]
            if found != [begin, end] or any(type(offset) is not int for offset in found):
                raise self.broken([f"{name}: its bytes are not those from {begin} to {end}"])
        if self._size != self._first + end:
            said = f"{self._size} bytes, its header and manifest say {self._first + end}"
            raise _damaged(self._folder, [f"{TENSORS_FILE}: {said}: altered or truncated"])
        return offsets

    def _differences(self, header: Mapping[str, Mapping[str, Any]]) -> list[str]:
        declared = self.infos
        problems = [f"{name}: missing" for name in sorted(declared.keys() - header.keys())]
        problems += [f"{name!a}: unexpected" for name in sorted(header.keys() - declared.keys())]
        for name in sorted(declared.keys() & header.keys()):
            expected = (declared[name].dtype, list(declared[name].shape))
            dtype, shape = header[name]["dtype"], header[name]["shape"]
            if (dtype, shape) != expected or any(type(size) is not int for size in shape):
                is_said = one_line(f"{dtype} {shape}", 200)
                has = f"the manifest has {expected[0]} {expected[1]}"
                problems.append(f"{name}: {is_said}, {has}")
        return problems

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except UnreadableError as error:
            raise _damaged(self._folder, [f"{TENSORS_FILE}: {error}"]) from None

    def broken(self, problems: list[str]) -> FileError:
        """Build the error for a file with these problems."""
        return FileError(
            f"{self._folder / TENSORS_FILE} does not match its manifest",
            expected="exactly the tensors of the manifest, with finite values",
            hint=COPY_AGAIN,
            offenders=shorten(problems),
        )


@contextmanager
def open_tensors(folder: Path, manifest: Manifest) -> Iterator[TensorFile]:
    """Open the tensor file of the adapter with this manifest; no value is read yet.

    Raises:
        FileError: it is missing, or its sizes or tensors differ from the manifest.
    """
    declared = manifest.nbytes
    if problems := size_problems(declared):
        raise _damaged(folder, problems)
    with ExitStack() as stack:
        try:
            path, most = folder / TENSORS_FILE, 8 + MAX_HEADER_BYTES + declared
            file = stack.enter_context(open_regular(path, declared, most))
        except UnreadableError as error:
            raise _damaged(folder, [f"{TENSORS_FILE}: {error}"]) from None
        yield TensorFile(folder, manifest, file)


def _damaged(folder: Path, problems: list[str]) -> FileError:
    return FileError(
        f"the adapter in {folder} is damaged",
        expected="the files exactly as they were written",
        hint=COPY_AGAIN,
        offenders=problems,
    )


def _begin(entry: Mapping[str, Any]) -> int:
    """Return the start of a tensor's bytes, by its entry in a header; -1 if the entry is broken."""
    offsets = entry["data_offsets"]
    return offsets[0] if isinstance(offsets, list) and offsets and type(offsets[0]) is int else -1


def not_finite(name: str, bad: int, values: int) -> str:
    """Describe the number of non-finite values of a tensor."""
    return f"{name}: {bad} of {values} values are NaN or infinite"


def count_not_finite(dtype: str, data: bytes) -> int:
    """Count the infinite values and NaNs in the bytes of a safetensors dtype."""
    if dtype not in _EXPONENTS:
        return 0
    import numpy as np

    integers, exponent = _EXPONENTS[dtype]
    bits = np.frombuffer(data, dtype=integers)
    return int(np.count_nonzero((bits & exponent) == exponent))


_TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_NAMES = {f"torch.{name}": dtype for dtype, name in _TORCH_NAMES.items()}


def checked_copies(
    manifest: Manifest, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return contiguous copies on the CPU.

    Raises:
        OutputError: the tensors cannot be saved; lists every problem.
    """
    problems = [line for name, t in tensors.items() for line in _tensor_problems(name, t)]
    _refuse(manifest, problems + _whole_problems(manifest, tensors))
    return {name: _on_cpu(tensors[name]).clone() for name in sorted(tensors)}


def checked_infos(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """Return a manifest's entries for tensors, which may be sharded over processes.

    Raises:
        OutputError: they cannot be saved, whatever their values; lists every problem.
    """
    problems = [line for name, t in tensors.items() for line in _kind_problems(name, t)]
    _refuse(manifest, problems + _whole_problems(manifest, tensors))
    return {name: tensor_info(tensor) for name, tensor in sorted(tensors.items())}


def _whole_problems(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return one line for each problem of the names, the heads and the size of all tensors."""
    problems = tensor_name_problems(tensors)
    if not tensors:
        problems.append("no tensors: the adapter is empty")
    if manifest.head and not any(str(name).startswith("head.") for name in tensors):
        problems.append("the manifest has a task head, but no tensor is named head.*")
    problems += [
        f"the manifest has the head {name!r}, but no tensor is named heads.{name}.*"
        for name, record in manifest.heads.items()
        if record.head and not any(str(each).startswith(f"heads.{name}.") for each in tensors)
    ]
    return problems or size_problems(
        sum(tensor_info(t).nbytes for t in tensors.values() if str(t.dtype) in _NAMES)
    )


def _refuse(manifest: Manifest, problems: list[str]) -> None:
    if problems:
        raise OutputError(
            f"adapter {manifest.name!r} cannot be saved",
            expected="named, non-empty, finite, dense tensors of a supported dtype",
            hint="use a checkpoint from before the run diverged; gather sharded parameters first",
            offenders=shorten(problems),
        )


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").contiguous()


def _kind_problems(name: str, tensor: torch.Tensor) -> list[str]:
    if str(tensor.dtype) not in _NAMES:
        return [f"{name}: {tensor.dtype} is not one of {' '.join(DTYPE_BYTES)}"]
    return [f"{name}: empty, shape {tuple(tensor.shape)}"] if tensor.numel() == 0 else []


def _tensor_problems(name: str, tensor: torch.Tensor) -> list[str]:
    if problems := _kind_problems(name, tensor):
        return problems
    if hasattr(tensor, "full_tensor"):
        return [f"{name}: a shard of {tuple(tensor.shape)}; gather it on all processes"]
    import torch

    if tensor.layout != torch.strided or tensor.is_meta:
        return [f"{name}: a tensor without dense storage ({tensor.layout}, {tensor.device})"]
    return _finite_problems(name, tensor)


def _finite_problems(name: str, tensor: torch.Tensor) -> list[str]:
    import torch

    bad = int(tensor.numel() - torch.isfinite(tensor.detach()).sum())
    return [not_finite(name, bad, tensor.numel())] if bad else []


def tensor_info(tensor: torch.Tensor) -> TensorInfo:
    """Return the dtype and shape of a tensor, for the manifest."""
    return TensorInfo(_NAMES[str(tensor.dtype)], tuple(tensor.shape))


def is_same_tensor(read: torch.Tensor, live: torch.Tensor) -> bool:
    """Compare dtype, shape and bytes."""
    import torch

    live = _on_cpu(live)
    if read.dtype != live.dtype or read.shape != live.shape:
        return False
    return torch.equal(read.reshape(-1).view(torch.uint8), live.reshape(-1).view(torch.uint8))


def tensor_bytes(copies: dict[str, torch.Tensor]) -> bytes:
    """Serialize tensors that `checked_copies` returned."""
    import safetensors.torch

    return safetensors.torch.save(copies)


def verified_tensors(file: TensorFile) -> dict[str, torch.Tensor]:
    """Read the tensors of an open file, sorted by name.

    Raises:
        FileError: the file does not match the digest of its manifest, or has non-finite values.
    """
    import torch

    data = {name: bytearray(info.nbytes) for name, info in sorted(file.infos.items())}
    bad: Counter[str] = Counter()
    read: Counter[str] = Counter()
    for name, piece in file.tensor_pieces():
        data[name][read[name] : read[name] + len(piece)] = piece
        read[name] += len(piece)
        bad[name] += count_not_finite(file.infos[name].dtype, piece)
    file.refuse(bad)
    return {
        name: torch.frombuffer(data[name], dtype=getattr(torch, _TORCH_NAMES[info.dtype])).reshape(
            info.shape
        )
        for name, info in sorted(file.infos.items())
    }

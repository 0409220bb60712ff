"""Differences between two saved adapters: fields of their manifests, and values of their tensors.

Tensors are compared one at a time, in double precision, without torch: the distance of two is

    |a - b| / |a|       in the Euclidean norm; |b| if a is zero
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from adapterhub.errors import FileError
from adapterhub.files.manifest import MAX_HEADER_BYTES, Manifest, TensorInfo
from adapterhub.files.native import TENSORS_FILE

# Long, or compared by value; the method is in `methods`, with all its options.
_LEFT_OUT = ("tensors", "files", "backbone.identity", "training.recipe.method")
_CHUNK = 1 << 22  # values that are in memory at a time
_FLAGS = os.O_RDONLY | sum(getattr(os, f, 0) for f in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
_MALFORMED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
          "I16": "<i2", "I8": "|i1", "U8": "|u1", "BOOL": "|u1"}  # fmt: skip


@dataclass(frozen=True)
class TensorDifference:
    """A tensor of one or both adapters; its shape is None where it is missing.

    `distance` is None unless both have it in the same shape.
    """

    first: tuple[int, ...] | None
    second: tuple[int, ...] | None
    distance: float | None = None


def manifest_differences(first: Manifest, second: Manifest) -> dict[str, tuple[Any, Any]]:
    """Return the fields that differ, as dotted paths, with both values; None where it is absent."""
    flat = [dict(_flat("", _tree(manifest))) for manifest in (first, second)]
    paths = list(dict.fromkeys((*flat[0], *flat[1])))
    pairs = {path: (flat[0].get(path), flat[1].get(path)) for path in paths}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}


def tensor_differences(
    first: tuple[Path, Manifest], second: tuple[Path, Manifest]
) -> dict[str, TensorDifference]:
    """Compare the tensors of two adapters, each given as its folder and manifest.

    Raises:
        FileError: the files of an adapter do not match its manifest.
    """
    differences = {}
    with _Tensors(*first) as a, _Tensors(*second) as b:
        for name in sorted(a.infos.keys() | b.infos.keys()):
            shapes = [t.infos[name].shape if name in t.infos else None for t in (a, b)]
            distance = _distance(a, b, name) if shapes[0] == shapes[1] else None
            differences[name] = TensorDifference(shapes[0], shapes[1], distance)
    return differences


class _Tensors:
    """The open tensor file of an adapter: `chunks` yields the values of one."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.path, self.infos = folder / TENSORS_FILE, manifest.tensors
        self._sha256 = manifest.files[TENSORS_FILE]
        self._file: BinaryIO | None = None
        self._starts: Mapping[str, int] = {}

    def __enter__(self) -> _Tensors:
        try:
            self._file = os.fdopen(os.open(self.path, _FLAGS), "rb")
            self._check(self._file)
            self._starts = self._read_header(self._file)
        except _MALFORMED as error:
            self.__exit__()
            raise self.broken() from error
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def chunks(self, name: str) -> Iterator[Any]:
        """Yield the values of a tensor in double precision, some at a time."""
        assert self._file is not None
        info = self.infos[name]
        dtype = np.dtype(_NUMPY[info.dtype])
        self._file.seek(self._starts[name])
        for start in range(0, math.prod(info.shape), _CHUNK):
            count = min(_CHUNK, math.prod(info.shape) - start)
            data = self._file.read(count * dtype.itemsize)
            if len(data) != count * dtype.itemsize:
                raise self.broken()
            yield _doubles(np.frombuffer(data, dtype), info)

    def _check(self, file: BinaryIO) -> None:
        """Check that it is a regular file of the expected size and digest, and rewind it."""
        status = os.fstat(file.fileno())
        most = 8 + MAX_HEADER_BYTES + sum(info.nbytes for info in self.infos.values())
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            raise ValueError(status.st_size)
        digest = hashlib.sha256()
        while data := file.read(_CHUNK):
            digest.update(data)
        if digest.hexdigest() != self._sha256:
            raise ValueError(self._sha256)
        file.seek(0)

    def _read_header(self, file: BinaryIO) -> dict[str, int]:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(length)
        header = json.loads(file.read(length))
        for name, info in self.infos.items():
            begin, end = header[name]["data_offsets"]
            if end - begin != info.nbytes or begin < 0:
                raise ValueError(name)
        return {name: 8 + length + header[name]["data_offsets"][0] for name in self.infos}

    def broken(self) -> FileError:
        """Build the error for a file that does not match its manifest."""
        return FileError(
            f"{self.path} does not match its manifest",
            expected="the tensors of the manifest, with finite values",
            hint="copy or pull the adapter again",
        )


def _doubles(raw: Any, info: TensorInfo) -> Any:
    """Convert stored values to doubles; numpy has no bf16, which is the upper half of a float."""
    if info.dtype == "BF16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float64)


def _distance(a: _Tensors, b: _Tensors, name: str) -> float:
    difference = norm = other = 0.0
    with np.errstate(all="ignore"):
        for x, y in zip(a.chunks(name), b.chunks(name), strict=True):
            difference += float(np.sum((x - y) ** 2))
            norm += float(np.sum(x**2))
            other += float(np.sum(y**2))
    for tensors, total in ((a, norm), (b, other)):
        if not math.isfinite(total):
            raise tensors.broken()
    return math.sqrt(difference / norm) if norm else math.sqrt(other)


def _tree(manifest: Manifest) -> dict[str, Any]:
    fields = {name: getattr(manifest, name) for name in Manifest.__dataclass_fields__}
    fields["methods"] = {
        name: options for spec in manifest.methods for name, options in spec.items()
    }
    fields["on"] = [f"{ref}, sha256 {ref.digest[:12]}" for ref in manifest.on]
    return fields | {"parameters": manifest.parameters, "bytes": manifest.nbytes}


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of the leaves; a list is one leaf."""
    if hasattr(value, "__dataclass_fields__"):
        value = {name: getattr(value, name) for name in value.__dataclass_fields__}
    if not isinstance(value, Mapping):
        yield path, list(map(_plain, value)) if isinstance(value, (list, tuple)) else value
        return
    for name, inner in value.items():
        inner_path = f"{path}.{name}" if path else name
        if inner_path not in _LEFT_OUT:
            yield from _flat(inner_path, inner)


def _plain(item: Any) -> Any:
    return item.content if hasattr(item, "content") else item  # a new token, by its text

"""Differences between two saved adapters: fields of their manifests, and values of their tensors.

Tensors are compared one at a time, in double precision, without torch: the distance of two is

    |a - b| / |a|       in the Euclidean norm; |b| if a is zero
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adapterhub.files.manifest import Manifest, TensorInfo
from adapterhub.files.native import Saved, TensorFile

# Long, or compared by value; the method is in `methods`, with all its options.
_LEFT_OUT = ("tensors", "files", "backbone.identity", "training.recipe.method")
_CHUNK = 1 << 18  # values held in memory
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
          "I16": "<i2", "I8": "|i1", "U8": "|u1", "BOOL": "|u1"}  # fmt: skip


@dataclass(frozen=True)
class TensorDifference:
    """A tensor of one or both adapters; its shape is None where it is missing.

    `distance` is None unless both have the tensor in the same shape.
    """

    first: tuple[int, ...] | None
    second: tuple[int, ...] | None
    distance: float | None = None


def manifest_differences(first: Manifest, second: Manifest) -> dict[str, tuple[Any, Any]]:
    """Return the differing fields, as dotted paths, with both values; None where absent."""
    return {path: (a, b) for path, (a, b) in differing_fields((first, second)).items()}


def differing_fields(manifests: Sequence[Manifest]) -> dict[str, tuple[Any, ...]]:
    """Return the fields that differ between manifests, with the value in each."""
    flat = [dict(_flat("", _tree(manifest))) for manifest in manifests]
    paths = dict.fromkeys(path for fields in flat for path in fields)
    values = {path: tuple(fields.get(path) for fields in flat) for path in paths}
    return {path: each for path, each in values.items() if any(v != each[0] for v in each)}


def field_row(path: str, values: Iterable[Any], most: int) -> list[str]:
    """Return a row of a table: a field in `train`'s form, and its values, truncated at `most`."""
    recipe, dot, option = path.partition("training.recipe.")
    typed = option if dot and not recipe and "." in option else path
    return [typed, *(value_text(value, most) for value in values)]


def value_text(value: Any, most: int) -> str:
    """Format the value of a field in at most this many characters; truncate a digest."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if re.fullmatch(r"([a-z0-9]+-)?[0-9a-f]{64}", text):  # a digest or fingerprint
        return text[:-52]
    return text if len(text) <= most else f"{text[:most]}..."


def tensor_differences(first: Saved, second: Saved) -> dict[str, TensorDifference]:
    """Compare the tensors of two adapters.

    Raises:
        FileError: the files of an adapter do not match its manifest.
    """
    differences = {}
    with first.open_tensors() as a, second.open_tensors() as b:
        a.check()
        b.check()
        for name in sorted(a.infos.keys() | b.infos.keys()):
            shapes = [t.infos[name].shape if name in t.infos else None for t in (a, b)]
            distance = _distance(a, b, name) if shapes[0] == shapes[1] else None
            differences[name] = TensorDifference(shapes[0], shapes[1], distance)
    return differences


def _numbers(file: TensorFile, name: str) -> Iterator[Any]:
    """Yield the values of a tensor in double precision, in pieces."""
    info = file.infos[name]
    dtype = np.dtype(_NUMPY[info.dtype])
    for piece in file.values(name, _CHUNK * dtype.itemsize):
        yield _doubles(np.frombuffer(piece, dtype), info)


def _doubles(raw: Any, info: TensorInfo) -> Any:
    """Convert stored values to doubles; numpy lacks bf16, which is the upper half of a float."""
    if info.dtype == "BF16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float64)


def _distance(a: TensorFile, b: TensorFile, name: str) -> float:
    difference = norm = other = 0.0
    with np.errstate(all="ignore"):
        for x, y in zip(_numbers(a, name), _numbers(b, name), strict=True):
            difference += float(np.sum((x - y) ** 2))
            norm += float(np.sum(x**2))
            other += float(np.sum(y**2))
    for file, total in ((a, norm), (b, other)):
        if not math.isfinite(total):
            raise file.broken([f"{name}: its norm is beyond all numbers"])
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

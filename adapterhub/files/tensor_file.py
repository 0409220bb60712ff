"""The bytes of a tensor file of the native format: all checks, without torch.

The format itself is described in `adapterhub.files.native`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import safetensors

from adapterhub.errors import printable
from adapterhub.files.manifest import MAX_HEADER_BYTES, Manifest
from adapterhub.files.schema import parse_object, show

_ENTRY = {"dtype", "shape", "data_offsets"}
# Of each dtype that may be infinite: the integers of its bits, and those of the exponent.
_EXPONENTS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}

TensorViews: TypeAlias = dict[str, dict[str, Any]]
"""Tensors by name, each with its `dtype`, `shape` and `data`."""


def tensor_views(manifest: Manifest, data: bytes) -> tuple[TensorViews, list[str]]:
    """Return the tensors in the bytes of a file, and one line for each that is wrong."""
    views: TensorViews = {}
    problems = _raw_header_problems(data)
    try:
        views = {} if problems else dict(safetensors.deserialize(data))
    except safetensors.SafetensorError as error:
        problems = [f"not a valid safetensors file: {printable(str(error))}"]
    problems = problems or _header_problems(manifest, views)
    if not problems:
        problems = [line for name in sorted(views) for line in _value_problems(name, views[name])]
    return views, problems


def not_finite(name: str, bad: int, values: int) -> str:
    """Say how many values of a tensor are not numbers.

    Args:
        name: of the tensor.
        bad: how many are infinite or NaN.
        values: how many there are.
    """
    return f"{name}: {bad} of {values} values are NaN or infinite"


def _value_problems(name: str, view: Mapping[str, Any]) -> list[str]:
    if view["dtype"] not in _EXPONENTS:
        return []
    import numpy as np

    dtype, exponent = _EXPONENTS[view["dtype"]]
    bits = np.frombuffer(view["data"], dtype=dtype)
    bad = int(np.count_nonzero((bits & exponent) == exponent))
    return [not_finite(name, bad, len(bits))] if bad else []


def _raw_header_problems(data: bytes) -> list[str]:
    """Find header problems that safetensors' own parser accepts, such as duplicate names."""
    length = int.from_bytes(data[:8], "little")
    if length > min(len(data) - 8, MAX_HEADER_BYTES):
        return [f"the header claims {length} bytes, the file has {max(len(data) - 8, 0)}"]
    header, problems = parse_object(data[8 : 8 + length], length)
    for name, entry in header.items():
        if name != "__metadata__" and not (isinstance(entry, dict) and entry.keys() == _ENTRY):
            problems.append(f"{show(name)}: its fields must be exactly {', '.join(sorted(_ENTRY))}")
    return [f"header: {line}" for line in problems]


def _header_problems(manifest: Manifest, views: Mapping[str, Mapping[str, object]]) -> list[str]:
    declared = manifest.tensors
    problems = [f"{name}: missing" for name in sorted(declared.keys() - views.keys())]
    problems += [f"{name!a}: unexpected" for name in sorted(views.keys() - declared.keys())]
    for name in sorted(declared.keys() & views.keys()):
        expected = (declared[name].dtype, list(declared[name].shape))
        actual = (views[name]["dtype"], views[name]["shape"])
        if actual != expected:
            dtype, shape = expected
            problems.append(f"{name}: {actual[0]} {actual[1]}, the manifest has {dtype} {shape}")
    return problems

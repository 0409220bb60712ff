"""Strict readers for other libraries' files: options in JSON, and tensors.

An unknown option is accepted only with a neutral value (null, false, empty), as written by later
versions of the library where the option has no effect. Tensors are in safetensors, or in a pickle
where the user allows it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors

from adapterhub.config.options import is_neutral
from adapterhub.errors import FileError
from adapterhub.files import schema
from adapterhub.files.atomic import UnreadableError, read_file
from adapterhub.files.schema import shorten, show

if TYPE_CHECKING:
    from torch import Tensor


def any_value(path: str, value: object) -> list[str]:
    """Accept every value."""
    return []


@dataclass(frozen=True)
class ConfigField:
    """One option: the check of its value, its default, and whether it must be present."""

    check: schema.Check = any_value
    default: Any = None
    required: bool = False


_WHOLE = ("torch.int32", "torch.int64")
TRAINING_ONLY = ConfigField()  # an option that does not affect the adapter's outputs


def only(*values: Any) -> ConfigField:
    """Return a field for an option with these supported values; the first is the default."""

    def check(path: str, value: object) -> list[str]:
        if value in values:
            return []
        supported = show(values[0])
        return [f"{path}: {show(value)} changes what is computed, only {supported} is supported"]

    return ConfigField(check, values[0])


def optional(check: schema.Check) -> schema.Check:
    """Return a check that also accepts null."""
    return lambda path, value: [] if value is None else check(path, value)


def either(description: str, *checks: schema.Check) -> schema.Check:
    """Return a check that accepts what any of `checks` accepts."""

    def check(path: str, value: object) -> list[str]:
        if any(not one(path, value) for one in checks):
            return []
        return [f"{path}: {show(value)} is not {description}"]

    return check


def read_json_object(path: Path, max_bytes: int, *, expected: str) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        FileError: the file is missing, too large, or not a JSON object.
    """
    try:
        data = read_file(path, 0, max_bytes, None)
    except UnreadableError as error:
        raise FileError(f"{path}: {error}", expected=expected) from None
    tree, problems = schema.parse_object(data, max_bytes)
    if problems:
        raise FileError(f"{path} cannot be read", offenders=shorten(problems))
    return tree


def config_problems(
    config: Mapping[str, Any], fields: Mapping[str, ConfigField], path: str = ""
) -> list[str]:
    """Return one line for each unsupported, unknown or missing option."""
    problems = []
    for name, value in sorted(config.items()):
        location = schema.at(path, name)
        if name in fields:
            problems += fields[name].check(location, value)
        elif not is_neutral(value):
            problems.append(f"{location}: unknown, and not neutral: {show(value)}")
    missing = [name for name, field in fields.items() if field.required and name not in config]
    return problems + [f"{schema.at(path, name)}: missing" for name in missing]


MAX_TENSOR_BYTES = 64 << 30


def read_tensor_file(
    folder: Path,
    safetensors_name: str,
    pickle_name: str,
    *,
    allow_pickle: bool = False,
    most: int = MAX_TENSOR_BYTES,
    places: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Read a checkpoint's tensors from safetensors or, if allowed, from a pickle.

    A pickle is opened with torch's `weights_only` loader, which runs no code. Tensors whose names
    end in one of `places` may hold integers.

    Raises:
        FileError: the file is missing, damaged, too large, or a pickle that was not allowed; or
            tensors are empty, non-finite or not of a floating-point dtype.
    """
    from safetensors.torch import load  # imports torch, which is slow

    is_pickle = not (folder / safetensors_name).exists() and (folder / pickle_name).exists()
    name = pickle_name if is_pickle else safetensors_name
    if is_pickle and not allow_pickle:
        raise FileError(
            f"{folder} contains {pickle_name}, a pickle",
            expected=safetensors_name,
            hint="allow_pickle (--allow-pickle) opens it with torch's weights_only loader",
        )
    try:
        data = read_file(folder / name, 1, min(most, MAX_TENSOR_BYTES), None)
        tensors = _load_pickle(data) if is_pickle else load(data)
    except (UnreadableError, safetensors.SafetensorError) as error:
        raise FileError(
            f"{folder / name} cannot be read: {str(error)[:300]}",
            expected="the tensors next to the configuration",
        ) from None
    problems = [line for name, t in tensors.items() for line in tensor_problems(name, t, places)]
    if problems or not tensors:
        raise FileError(
            f"the tensors in {folder / name} cannot be used",
            offenders=shorten(problems) or ["no tensors"],
            expected="finite values",
            hint="sharded training writes empty files: gather the parameters and save again",
        )
    return tensors


def _load_pickle(data: bytes) -> dict[str, Tensor]:
    from adapterhub.backbones.checkpoint import load_torch_file  # imports torch

    try:
        return load_torch_file(io.BytesIO(data))
    except ValueError as error:
        raise UnreadableError(str(error)) from None


def tensor_problems(name: str, tensor: Tensor, places: tuple[str, ...] = ()) -> list[str]:
    """Return one line if a tensor cannot belong to an adapter, otherwise none."""
    whole = name.endswith(places) if places else False
    if not tensor.is_floating_point() and not (whole and str(tensor.dtype) in _WHOLE):
        return [f"{name!a}: {tensor.dtype} is not a floating-point dtype"]
    if tensor.numel() == 0:
        return [f"{name!a}: empty, shape {tuple(tensor.shape)}"]
    # Importers compute in fp32.
    bad = int((~tensor.float().isfinite()).sum())
    return (
        [f"{name!a}: {bad} of {tensor.numel()} values are NaN or infinite in fp32"] if bad else []
    )

"""Tensors of other libraries: safetensors, or a pickle of tensors where the user allows it."""

from __future__ import annotations

import io
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from adapterhub.errors import FileError
from adapterhub.files.atomic import UnreadableError, read_file
from adapterhub.files.schema import shorten

MAX_TENSOR_BYTES = 64 << 30


def read_foreign_tensors(
    folder: Path, safe: str, pickled: str, *, allow_pickle: bool = False
) -> dict[str, Tensor]:
    """The tensors in the file `safe` of a folder; where there is none, `allow_pickle` opens the
    file `pickled` by torch's `weights_only` loader, which builds tensors and nothing else.

    Raises:
        FileError: a file is missing or broken, or is a pickle that was not allowed; or tensors are
            empty, not finite or not of floating point.
    """
    is_pickle = not (folder / safe).exists() and (folder / pickled).exists()
    name = pickled if is_pickle else safe
    if is_pickle and not allow_pickle:
        raise FileError(
            f"{folder} holds {pickled}, a pickle",
            expected=safe,
            hint="allow_pickle (--allow-pickle) opens it with torch's weights_only loader",
        )
    try:
        data = read_file(folder / name, 1, MAX_TENSOR_BYTES, None)
        loaded = _load_pickle(data) if is_pickle else safetensors.torch.load(data)
    except (UnreadableError, safetensors.SafetensorError) as error:
        raise FileError(
            f"{folder / name} cannot be read: {str(error)[:300]}",
            expected="the tensors beside the configuration",
        ) from None
    problems = [line for name, t in loaded.items() for line in tensor_problems(name, t)]
    if problems or not loaded:
        raise FileError(
            f"the tensors in {folder / name} cannot be used",
            offenders=shorten(problems) or ["no tensors"],
            expected="finite numbers",
            hint="sharded training leaves empty files: gather the parameters and save again",
        )
    return loaded


def _load_pickle(data: bytes) -> dict[str, Tensor]:
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch's reader raises any kind, and advises to read code too
        raise UnreadableError(f"{type(error).__name__}: broken, or not tensors alone") from None
    if isinstance(loaded, dict) and all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in loaded.items()
    ):
        return dict(loaded)
    raise UnreadableError("not a mapping of names to tensors")


def tensor_problems(name: str, tensor: Tensor) -> list[str]:
    """Why a tensor cannot be one of an adapter."""
    if not tensor.is_floating_point():
        return [f"{name!a}: {tensor.dtype} is not a floating point dtype"]
    if tensor.numel() == 0:
        return [f"{name!a}: empty, shape {tuple(tensor.shape)}"]
    bad = int(tensor.numel() - torch.isfinite(tensor).sum())
    return [f"{name!a}: {bad} of {tensor.numel()} numbers are NaN or infinite"] if bad else []

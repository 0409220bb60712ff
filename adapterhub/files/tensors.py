"""The tensors of the native format: from and to bytes. The only module here that needs torch.

The format itself is described in `adapterhub.files.native`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import safetensors.torch
import torch

from adapterhub.errors import OutputError
from adapterhub.files.manifest import (
    DTYPE_BYTES,
    Manifest,
    TensorInfo,
    size_problems,
    tensor_name_problems,
)
from adapterhub.files.schema import shorten
from adapterhub.files.tensor_file import TensorFile, count_not_finite, not_finite

_DTYPES: Mapping[str, torch.dtype] = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


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
    """Return what a manifest has of tensors, which may be divided over processes.

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
        sum(tensor_info(t).nbytes for t in tensors.values() if t.dtype in _DTYPE_NAMES)
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
    if tensor.dtype not in _DTYPE_NAMES:
        return [f"{name}: {tensor.dtype} is not one of {' '.join(DTYPE_BYTES)}"]
    return [f"{name}: empty, shape {tuple(tensor.shape)}"] if tensor.numel() == 0 else []


def _tensor_problems(name: str, tensor: torch.Tensor) -> list[str]:
    if problems := _kind_problems(name, tensor):
        return problems
    if hasattr(tensor, "full_tensor"):
        return [f"{name}: a shard of {tuple(tensor.shape)}; gather it on all processes"]
    if tensor.layout != torch.strided or tensor.is_meta:
        return [f"{name}: a tensor without dense storage ({tensor.layout}, {tensor.device})"]
    return _finite_problems(name, tensor)


def _finite_problems(name: str, tensor: torch.Tensor) -> list[str]:
    bad = int(tensor.numel() - torch.isfinite(tensor.detach()).sum())
    return [not_finite(name, bad, tensor.numel())] if bad else []


def tensor_info(tensor: torch.Tensor) -> TensorInfo:
    """Return the dtype and shape of a tensor, for the manifest."""
    return TensorInfo(_DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


def is_same_tensor(read: torch.Tensor, live: torch.Tensor) -> bool:
    """Compare dtype, shape and bytes."""
    live = _on_cpu(live)
    if read.dtype != live.dtype or read.shape != live.shape:
        return False
    return torch.equal(read.reshape(-1).view(torch.uint8), live.reshape(-1).view(torch.uint8))


def tensor_bytes(copies: dict[str, torch.Tensor]) -> bytes:
    """Serialize tensors that `checked_copies` returned."""
    return safetensors.torch.save(copies)


def verified_tensors(file: TensorFile) -> dict[str, torch.Tensor]:
    """Read the tensors of an open file, sorted by name.

    Raises:
        FileError: the file has not the digest of its manifest, or values that are not finite.
    """
    data = {name: bytearray(info.nbytes) for name, info in sorted(file.infos.items())}
    bad: Counter[str] = Counter()
    read: Counter[str] = Counter()
    for name, piece in file.tensor_pieces():
        data[name][read[name] : read[name] + len(piece)] = piece
        read[name] += len(piece)
        bad[name] += count_not_finite(file.infos[name].dtype, piece)
    file.refuse(bad)
    return {
        name: torch.frombuffer(data[name], dtype=_DTYPES[info.dtype]).reshape(info.shape)
        for name, info in sorted(file.infos.items())
    }

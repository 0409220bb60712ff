"""Read weights in any storage format; no other module depends on the format.

`nn.Linear` stores W as (d_out, d_in), GPT-2's `Conv1D` as (d_in, d_out). A fused projection has one
W; a site owns its rows `part`. FSDP2 (`torch.distributed.fsdp.fully_shard`) leaves each process a
shard of every parameter. accelerate keeps offloaded weights on the CPU or on disk, and loads them
for the duration of a call.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from adapterhub.anatomy.backbone import DTYPES, is_offloaded, is_sharded, storage_problem, whole
from adapterhub.anatomy.sites import FeatureSlice
from adapterhub.backbones.quantized import computes_with, dequantized, has_own_code
from adapterhub.errors import SiteError

_READABLE = (*DTYPES.values(), torch.float64)


def as_stored(module: nn.Module, matrix: Tensor) -> Tensor:
    """Convert W or an update of it, (d_out, d_in), to the module's layout, or back."""
    return matrix.T if isinstance(module, Conv1D) else matrix


def _onloaded(module: nn.Module) -> AbstractContextManager[None]:
    return align_module_device(module) if is_offloaded(module) else nullcontext()


def read_weight(module: nn.Module, part: FeatureSlice | None = None) -> Tensor:
    """Return the weight W of y = W x + b, (d_out, d_in), in fp32.

    The result is a view of the stored weight if possible; a quantized weight is decoded. A layer
    with custom code is called once, to check that it computes with this weight.

    Raises:
        SiteError: the weight of this kind of module cannot be read.
    """
    with _onloaded(module):
        rows = _decoded(module)
        if not _is_computed_with(module, rows):
            raise _unreadable(module, "a layer that computes x Wᵀ + b with its weight")
    return _rows_of(rows, part)


def reread_weight(module: nn.Module, part: FeatureSlice | None = None) -> Tensor:
    """Return the result of `read_weight` in a forward pass, without calling or waiting.

    Raises:
        SiteError: the weight of this kind of module cannot be read.
    """
    with _onloaded(module):
        rows = _decoded(module)
    return _rows_of(rows, part)


def _rows_of(rows: Tensor, part: FeatureSlice | None) -> Tensor:
    rows = whole(rows)
    return (rows if part is None else part.read(rows.T).T).to(torch.float32)


def _decoded(module: nn.Module) -> Tensor:
    weight = getattr(module, "weight", None)
    coded = storage_problem(weight) and not (weight is not None and is_sharded(weight))
    rows = dequantized(module) if coded else None
    if rows is None:
        rows = _stored(module, weight)
    if rows.dtype not in _READABLE:
        raise _unreadable(module, "a weight in floating point, or codes with their scales")
    return rows


def _stored(module: nn.Module, weight: object) -> Tensor:
    plain = isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point()
    if not plain or not isinstance(module, (nn.Linear, Conv1D)):
        supported = "a Linear or Conv1D in floating point or in a supported quantization"
        raise _unreadable(module, supported)
    assert isinstance(weight, Tensor)
    return weight.T if isinstance(module, Conv1D) else weight


def _is_computed_with(module: nn.Module, rows: Tensor) -> bool:
    """Return whether a layer computes with the weight that was read."""
    if not has_own_code(module) or rows.is_meta or is_sharded(rows):
        return True
    weight: Any = module.weight
    dtype = weight.dtype if weight.dtype in _READABLE else torch.bfloat16
    return computes_with(module, rows, dtype)


def _unreadable(module: nn.Module, expected: str) -> SiteError:
    return SiteError(
        f"the weight of a {type(module).__name__} cannot be read",
        expected=expected,
        hint="a method that does not read weights, such as lora",
    )


def read_bias(module: nn.Module, part: FeatureSlice | None = None) -> Tensor | None:
    """Return the bias b of y = W x + b, (d_out,), as stored; None if the layer lacks one."""
    with _onloaded(module):
        bias: Tensor | None = getattr(module, "bias", None)
    bias = bias if bias is None else whole(bias)
    return bias if bias is None or part is None else part.read(bias)

"""Read weights, however they are stored; no other module depends on their storage.

`nn.Linear` stores W as (d_out, d_in), GPT-2's `Conv1D` as (d_in, d_out). A fused projection has one
W, of which a site owns the rows `part`. FSDP2 (`torch.distributed.fsdp.fully_shard`) leaves each
process a shard of every parameter. accelerate keeps offloaded weights on the CPU or on disk and
loads them for the duration of a call.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from adapterhub.anatomy.sites import Anatomy, FeatureSlice
from adapterhub.backbones.quantized import quantization_kind
from adapterhub.backbones.quantized_layers import computes_with, dequantized, has_own_code
from adapterhub.errors import SiteError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_READABLE = (*DTYPES.values(), torch.float64)


def storage_problem(parameter: object) -> str:
    """Describe why a parameter cannot be overwritten with only a rounding error.

    "" for a plain floating point parameter.
    """
    if not isinstance(parameter, nn.Parameter):
        return "it is not stored as one parameter"
    if is_sharded(parameter):
        return "each process holds a share of it"
    # Quantized weights are a subclass of Parameter or Tensor, or hold integers.
    if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
        return f"it is quantized: {type(parameter).__name__}"
    if parameter.dtype not in DTYPES.values():
        return f"it is stored as {str(parameter.dtype).removeprefix('torch.')}"
    return ""


def storage_problems(
    parameters: Mapping[str, nn.Parameter], paths: Iterable[str], shown: int = 3
) -> list[str]:
    """List the storage problems of parameters, one per line; the first `shown` of them in full."""
    problems = [
        f"{path}: {problem}" for path in paths if (problem := storage_problem(parameters[path]))
    ]
    more = len(problems) - shown
    return problems[:shown] + ([f"and {more} more"] if more > 0 else [])


def dtype_and_quantization(
    model: PreTrainedModel, originals: Mapping[int, nn.Parameter]
) -> tuple[str | None, str | None]:
    """Return the dtype of a model's weights, a key of DTYPES, and their kind of quantization.

    `originals` maps the id of a parameter that an adapter owns to the backbone's parameter that it
    replaces.
    """
    first = next(p for p in model.parameters() if p.is_floating_point())
    stored = originals.get(id(first), first).dtype
    dtype = next((name for name, dtype in DTYPES.items() if dtype == stored), None)
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return dtype, None
    return dtype, quantization_kind(config if isinstance(config, dict) else config.to_dict())


def as_stored(module: nn.Module, matrix: Tensor) -> Tensor:
    """Convert W or an update of it, (d_out, d_in), to the module's layout, or back."""
    return matrix.T if isinstance(module, Conv1D) else matrix


def packed_hosts(anatomy: Anatomy) -> list[str]:
    """List the paths of projections that store packed codes in place of a weight.

    Layers of GPTQ and AWQ do: they can be called, but their weights cannot be read.
    """
    hosts = dict.fromkeys(
        s.host for s in anatomy.sites.values() if s.kind == "linear" and not s.matrix
    )
    modules = ((host, anatomy.model.get_submodule(host)) for host in hosts)
    return [host for host, m in modules if not isinstance(getattr(m, "weight", None), Tensor)]


def is_offloaded(module: nn.Module) -> bool:
    """Return whether accelerate offloads the module's own weights."""
    return bool(getattr(getattr(module, "_hf_hook", None), "offload", False))


def offloaded(model: nn.Module, paths: Iterable[str]) -> list[str]:
    """List the parameters of a model, among `paths`, that accelerate offloads."""
    return [p for p in paths if is_offloaded(model.get_submodule(p.rpartition(".")[0]))]


def device_of(module: nn.Module) -> torch.device | None:
    """Return the device on which a module computes; None if it has no weights."""
    for part in module.modules():
        if is_offloaded(part):
            return torch.device(part._hf_hook.execution_device)  # type: ignore[union-attr, arg-type]
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            return tensor.device
    return None


def _onloaded(module: nn.Module) -> AbstractContextManager[None]:
    return align_module_device(module) if is_offloaded(module) else nullcontext()


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which this process may hold only a shard."""
    return hasattr(tensor, "full_tensor")


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor holds numbers, not the codes of a quantization."""
    has_codes = hasattr(tensor, "__tensor_flatten__") and not is_sharded(tensor)
    # Counters, positions and masks among the buffers; codes are of 4, 8 or 32 bits.
    has_numbers = tensor.is_floating_point() or tensor.dtype in (torch.int64, torch.bool)
    return has_numbers and not tensor.is_meta and not has_codes


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor, gathered if it is sharded: all processes must call this together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def shared_like(live: Tensor, tensor: Tensor) -> Tensor:
    """Return a whole tensor, or this process's share of it if `live`, of its shape, is sharded."""
    if not is_sharded(live) or is_sharded(tensor) or live.shape != tensor.shape:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor  # torch without distributed

    assert isinstance(live, DTensor)
    mesh, tensor = live.device_mesh, tensor.to(live.device)
    return distribute_tensor(tensor, mesh, live.placements, src_data_rank=None)


def with_whole_parameters(module: nn.Module) -> Any:
    """Return a module with whole parameters: a copy if some are sharded.

    All processes must call this together.
    """
    sharded = [parameter for parameter in module.parameters() if is_sharded(parameter)]
    if not sharded:
        return module
    return copy.deepcopy(module, {id(p): nn.Parameter(whole(p.detach())) for p in sharded})


def read_weight(module: nn.Module, part: FeatureSlice | None = None) -> Tensor:
    """Return the weight W of y = W x + b, (d_out, d_in), in fp32.

    A view of the stored weight if possible; decoded if the layer is quantized. A layer with code of
    its own is called once, to see that it computes with this weight.

    Raises:
        SiteError: the weight of this kind of module cannot be read.
    """
    with _onloaded(module):
        rows = _decoded(module)
        if not _is_computed_with(module, rows):
            raise _unreadable(module, "a layer that computes x Wᵀ + b with its weight")
    return _rows_of(rows, part)


def reread_weight(module: nn.Module, part: FeatureSlice | None = None) -> Tensor:
    """Return what `read_weight` does, in a forward pass: nothing is called or waited for.

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
    """Return the bias b of y = W x + b, (d_out,), as stored; None if there is none."""
    with _onloaded(module):
        bias: Tensor | None = getattr(module, "bias", None)
    bias = bias if bias is None else whole(bias)
    return bias if bias is None or part is None else part.read(bias)

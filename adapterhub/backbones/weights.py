"""How the weights of a projection are stored: the only place that knows.

`nn.Linear` keeps W as (d_out, d_in), GPT-2's `Conv1D` as (d_in, d_out). A projection that is
fused of several has one W for all of them, of which a site owns the rows `part`. FSDP2
(`torch.distributed.fsdp.fully_shard`) leaves each process a shard of every parameter. accelerate
keeps offloaded weights on the CPU or a disk, and brings them in for the time of a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from adapterhub.anatomy.sites import Anatomy, FeatureSlice
from adapterhub.backbones.quantized import dequantized
from adapterhub.errors import SiteError

PLAIN = (torch.float32, torch.bfloat16, torch.float16)


def storage_problem(parameter: object) -> str:
    """Why a parameter cannot be replaced by other numbers without another loss than rounding; ""
    for a plain one of floating point numbers."""
    if not isinstance(parameter, nn.Parameter):
        return "it is not kept as one parameter"
    # Quantized weights are a kind of parameter or of tensor of their own, or keep integers.
    if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
        return f"it is quantized: {type(parameter).__name__}"
    if parameter.dtype not in PLAIN:
        return f"it is kept as {str(parameter.dtype).removeprefix('torch.')}"
    return ""


def storage_problems(
    parameters: Mapping[str, nn.Parameter], paths: Iterable[str], shown: int = 3
) -> list[str]:
    """One line for each of these parameters that has a problem, in full for the first `shown`."""
    found = [
        f"{path}: {problem}" for path in paths if (problem := storage_problem(parameters[path]))
    ]
    more = len(found) - shown
    return found[:shown] + ([f"and {more} more"] if more > 0 else [])


def as_stored(module: nn.Module, matrix: Tensor) -> Tensor:
    """W: (d_out, d_in), or a change of it, in the layout in which the module keeps its own; and
    the way back, for it is the same."""
    return matrix.T if isinstance(module, Conv1D) else matrix


def packed_hosts(anatomy: Anatomy) -> list[str]:
    """The paths of projections that keep no weight as a tensor of their own, but packed codes, as
    GPTQ and AWQ do: they can be called, and not read."""
    hosts = dict.fromkeys(s.host for s in anatomy.sites.values() if s.kind == "linear")
    found = ((host, anatomy.model.get_submodule(host)) for host in hosts)
    return [host for host, m in found if not isinstance(getattr(m, "weight", None), Tensor)]


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate keeps the module's own weights elsewhere."""
    return bool(getattr(getattr(module, "_hf_hook", None), "offload", False))


def offloaded(model: nn.Module, paths: Iterable[str]) -> list[str]:
    """Those of a model's parameters that accelerate keeps elsewhere."""
    return [p for p in paths if is_offloaded(model.get_submodule(p.rpartition(".")[0]))]


def device_of(module: nn.Module) -> torch.device | None:
    """Where a module computes; None if it has no weights."""
    for part in module.modules():
        if is_offloaded(part):
            return torch.device(part._hf_hook.execution_device)  # type: ignore[union-attr, arg-type]
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            return tensor.device
    return None


def _brought(module: nn.Module) -> AbstractContextManager[None]:
    return align_module_device(module) if is_offloaded(module) else nullcontext()


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds a part of the tensor alone (a DTensor)."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """The tensor; one that is sharded is gathered, for which all processes must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def read_weight(module: nn.Module, part: FeatureSlice | None = None) -> Tensor:
    """The weight W of y = W x + b, (d_out, d_in), in fp32: a view where it is stored like that, the
    one that a quantized layer computes with.

    Raises:
        SiteError: a kind of module whose weight cannot be read.
    """
    with _brought(module):
        weight = getattr(module, "weight", None)
        rows = dequantized(module) if storage_problem(weight) else None
        if rows is None:
            rows = _stored(module, weight)
    return (rows if part is None else part.read(rows.T).T).to(torch.float32)


def _stored(module: nn.Module, weight: object) -> Tensor:
    plain = isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point()
    if not plain or not isinstance(module, (nn.Linear, Conv1D)):
        raise SiteError(
            f"the weight of a {type(module).__name__} cannot be read",
            expected="a Linear or Conv1D, of floating point numbers or of a known quantization",
            hint="a method that does not read weights, such as lora",
        )
    assert isinstance(weight, Tensor)
    return weight.T if isinstance(module, Conv1D) else weight


def read_bias(module: nn.Module, part: FeatureSlice | None = None) -> Tensor | None:
    """The bias b of y = W x + b, (d_out,), as it is stored; None without one."""
    with _brought(module):
        bias: Tensor | None = getattr(module, "bias", None)
    return bias if bias is None or part is None else part.read(bias)

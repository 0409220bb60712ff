"""FSDP2: each process holds a share of every parameter, and gathers a layer while it computes.

`torch.distributed.fsdp.fully_shard` divides each parameter along its first dimension over the N
processes. A layer's parameters are gathered before its forward and its backward pass and released
after it, so that a process holds 1 / N of the model and one or two whole layers. Gradients are
averaged over the processes and divided in the same way. The optimizer steps on its own share.

Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", section 3,
https://arxiv.org/abs/2304.11277.

Each process writes its share to files, and any number of processes can read them, sharded or not:

    <folder>/shard-<process>-model-<n>-of-<N>.safetensors

torch.distributed.checkpoint writes and reads them. The header of a file has the position of each
part in its whole tensor.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from adapterhub.adapters.adapter import Adapter, OwnedParameter
from adapterhub.anatomy.backbone import Backbone, is_sharded, local, shared_like
from adapterhub.backbones.quantized import sharded_codes
from adapterhub.errors import ConfigError
from adapterhub.loop.processes import join_processes, own_device, process_count
from adapterhub.methods.common.site_module import SharedModule

OF_TENSORS, OF_OPTIMIZER = "tensors/", "optimizer/"  # prefixes of names in files


def shard(adapter: Adapter) -> None:
    """Shard a model and its attached adapter: each layer, then the rest.

    A model on the CPU moves to the device of this process layer by layer. Parameters that were
    loaded in the dtype of their files are read from the disk only now, so that a process never
    holds more than its share and a layer.

    Every process keeps a whole copy of the parameters that several layers share, since they belong
    to none of them; the gradients of the copies are averaged. Backbone modules replaced by an
    adapter cannot be restored, so their memory is released. The adapter's copies of parameters may
    be empty (`empty_copies`).

    Raises:
        ConfigError: the backbone's checkpoint is quantized in a way that cannot be sharded.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    _check_codes(adapter.backbone)
    join_processes()
    adapter.state.keep_identity()
    model, layers, device = adapter.model, _layers(adapter), own_device()
    common = _common(model, layers)
    for changed in adapter.changed:
        if changed.own in common:
            changed.fill()
    for parameter in common:
        parameter.data = parameter.data.to(device)
        _average_gradients(parameter)
    mesh = init_device_mesh(device.type, (process_count(),))
    for module in (*layers, model):
        own = [changed for changed in adapter.changed if _holds(module, changed)]
        for changed in own:
            changed.fill()
        fully_shard(module, mesh=mesh, ignored_params=common)
        for changed in own:
            changed.follow()
    if adapter.backbone.generates:
        register_fsdp_forward_method(model, "generate")


def reshard(model: nn.Module) -> None:
    """Release parameters outside layers that a forward pass without a backward pass leaves whole.

    FSDP2 keeps those parameters for the backward pass. Until then, the model exposes parameters
    that the optimizer does not train.
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.reshard()


def _check_codes(backbone: Backbone) -> None:
    kind = backbone.quantization
    if kind is not None and kind not in sharded_codes():
        raise ConfigError(
            f"{backbone.source} is quantized by {kind}, whose weights cannot be sharded",
            expected=f"a backbone in fp32, bf16 or fp16, or in {' or '.join(sharded_codes())}",
            hint="another backbone, or train.shard=false",
        )


def _holds(module: nn.Module, changed: OwnedParameter) -> bool:
    """Return whether a module contains an unsharded copy."""
    inside = any(changed.holders[0][0] is each for each in module.modules())
    return inside and not is_sharded(changed.own)


def _layers(adapter: Adapter) -> list[nn.Module]:
    """Return the layers of all stacks, excluding layers inside other layers."""
    paths = {path for paths in adapter.anatomy.layers.values() for path in paths}
    outer = [p for p in paths if not any(p.startswith(f"{other}.") for other in paths)]
    return [adapter.model.get_submodule(path) for path in sorted(outer)]


def _common(model: nn.Module, layers: list[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters shared by several layers, or by a layer and the rest."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    rest = [module for module in model.modules() if id(module) not in inside]
    owned = [set(layer.parameters()) for layer in layers]
    owned.append({p for module in rest for p in module.parameters(recurse=False)})
    owners = Counter(parameter for each in owned for parameter in each)
    read = [m for m in model.modules() if isinstance(m, SharedModule)]
    several = {parameter for parameter, count in owners.items() if count > 1}
    return several | {p for module in read for p in module.parameters()}


def _average_gradients(parameter: nn.Parameter) -> None:
    """Average each gradient of a whole parameter over the processes, even if it trains later."""
    if parameter.is_floating_point():
        trains = parameter.requires_grad
        parameter.requires_grad_(True)
        parameter.register_hook(_averaged)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(trains)


def _averaged(gradient: Tensor) -> Tensor:
    """Return the mean of a gradient over the processes."""
    total = gradient.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def share_state(
    state: Mapping[int, Mapping[str, Any]], params: Sequence[Tensor]
) -> dict[int, dict[str, Any]]:
    """Divide the whole tensors of an optimizer's state, by parameter index, like the parameters."""
    return {
        number: {
            name: shared_like(params[number], value) if isinstance(value, Tensor) else value
            for name, value in kept.items()
        }
        for number, kept in state.items()
    }


def clip_gradients(params: Sequence[Tensor], limit: float) -> Tensor:
    """Scale the gradients to a norm of at most `limit`; return their previous norm.

    g := g min(1, limit / |g|)    |g|: over the gradients of all parameters, in all processes

    Parameters may be sharded or whole.
    """
    gradients = [p.grad for p in params if p.grad is not None]
    shards = [local(g) for g in gradients if _is_divided(g)]
    wholes = [local(g) for g in gradients if not _is_divided(g)]
    squared = torch.nn.utils.get_total_norm(shards).square()
    if shards:
        dist.all_reduce(squared)
    norm = (squared + torch.nn.utils.get_total_norm(wholes).square()).sqrt()
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradient in (*shards, *wholes):
        gradient.mul_(factor)
    return norm


def _is_divided(tensor: Tensor) -> bool:
    """Return whether each process holds different elements of a tensor, not a copy."""
    placements: Any = getattr(tensor, "placements", ())
    return not all(placement.is_replicate() for placement in placements)


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> list[Path]:
    """Write tensors, possibly sharded over processes; return the files that this process wrote.

    All processes must call this together, with the same names, for a shared folder.

    Raises:
        OSError: a process cannot write its part.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        raise _first_os_error(error) from error
    return sorted(folder.glob(f"shard-{dist.get_rank() + 1:05d}-*.safetensors"))


def has_shards(folder: Path) -> bool:
    """Return whether a folder has files of sharded tensors."""
    return any(folder.glob("shard-*.safetensors"))


def described(folder: Path) -> dict[str, Tensor]:
    """Return tensors on the meta device with the shapes and dtypes of those in a folder."""
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_shards(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Read tensors into the given ones, in place: whole ones, or this process's part.

    With several processes, all must call this together.

    Raises:
        ValueError: a tensor is missing, or a file cannot be read.
    """
    state: dict[str, Any] = dict(into)
    reader = HuggingFaceStorageReader(str(folder))
    try:
        with warnings.catch_warnings():  # torch's note about a single process
            warnings.simplefilter("ignore", UserWarning)
            load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise ValueError(str(error)) from error


def split_training(
    training: dict[str, Any] | None,
) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Split a training state into a state without the optimizer's tensors, and these by name."""
    if training is None:
        return None, {}
    engine = training["engine"]
    kept = engine["optimizer"]["state"]
    tensors = {
        f"{OF_OPTIMIZER}{number}/{name}": value
        for number, values in kept.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }
    rest = {
        number: {name: v for name, v in values.items() if not isinstance(v, Tensor)}
        for number, values in kept.items()
    }
    optimizer = {**engine["optimizer"], "state": rest}
    return {**training, "engine": {**engine, "optimizer": optimizer}}, tensors


def join_training(
    training: dict[str, Any], folder: Path, params: Sequence[Tensor]
) -> dict[str, Any]:
    """Join a training state with the tensors that `split_training` took out of it.

    Tensors with the shape of their parameter are sharded like it.
    """
    into = {
        name: _place_for(tensor, params[int(name.split("/")[1])])
        for name, tensor in described(folder).items()
        if name.startswith(OF_OPTIMIZER)
    }
    read_shards(folder, into)
    optimizer = training["engine"]["optimizer"]
    state = {number: dict(values) for number, values in optimizer["state"].items()}
    for name, tensor in into.items():
        _, number, field = name.split("/")
        state[int(number)][field] = tensor
    engine = {**training["engine"], "optimizer": {**optimizer, "state": state}}
    return {**training, "engine": engine}


def _place_for(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return zeros to read a tensor of a parameter's state into."""
    if tensor.shape == parameter.shape:
        return torch.zeros_like(parameter.detach(), dtype=tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _first_os_error(error: CheckpointException) -> OSError:
    """Return the first reason why a process could not write."""
    reasons = (pair[0] for pair in error.failures.values())
    errors = [reason for reason in reasons if isinstance(reason, OSError)]
    return errors[0] if errors else OSError(str(error))

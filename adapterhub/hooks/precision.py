"""Trained parameters in fp32 on a bf16 or fp16 backbone.

In bf16 or fp16 a small update is lost to rounding. So trained parameters are kept in fp32, and the
module that holds one gets a copy in the backbone's dtype for each call. Calls of several threads
may overlap: they share any of the copies, and the last call restores the parameter. A task head
computes in fp32.

Hooks are plain functions that find their data on the module, so that a model with adapters can be
copied, pickled and moved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from adapterhub.anatomy.projections import is_projection
from adapterhub.patch import Patch

_MASTERS = "_adapterhub_masters"
_EXCHANGE = threading.Lock()  # held while parameters are exchanged, not during a call


@dataclass
class Masters:
    """The fp32 parameters of a module, each with the dtype that the module computes in.

    `calls` has the threads that are inside a call of the module.
    """

    named: dict[str, tuple[nn.Parameter, torch.dtype]] = field(default_factory=dict)
    patch: Patch = field(default_factory=Patch)
    calls: set[int] = field(default_factory=set)

    def find(self, module: nn.Module) -> None:
        """Record the current parameters of the module, which FSDP2 gathers for each call."""
        for name, (_, dtype) in self.named.items():
            parameter = module._parameters[name]
            if isinstance(parameter, nn.Parameter):  # and not the copy of another call
                self.named[name] = (parameter, dtype)


def hold_in_fp32(module: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Keep a parameter in fp32, and compute with it in another dtype.

    `dtype` is the compute dtype.
    """
    masters = module.__dict__.get(_MASTERS)
    if masters is None:
        masters = Masters()
        masters.patch.override(module, _MASTERS, masters)
        masters.patch.hook(module.register_forward_pre_hook, lower, prepend=True)
        masters.patch.hook(module.register_forward_hook, put_back, prepend=True, always_call=True)
    masters.named[name] = (module.get_parameter(name), dtype)


def release_from_fp32(module: nn.Module, name: str) -> None:
    """Undo `hold_in_fp32`, if it was done; the module's hooks are removed with the last one."""
    masters = module.__dict__.get(_MASTERS)
    if masters is None:
        return
    masters.named.pop(name, None)
    if not masters.named:
        masters.patch.undo()


def fp32_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return a parameter of a module, never the copy used during a call.

    An interrupted call leaves its copy there until the next one.
    """
    parameter = module._parameters[name]
    masters = module.__dict__.get(_MASTERS)
    if masters is None or isinstance(parameter, nn.Parameter):
        return parameter
    master: nn.Parameter = masters.named[name][0]
    return master


def convert_masters(model: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Set the compute dtype to that of a converted model, as after `model.half()`."""
    for module in model.modules():
        if masters := module.__dict__.get(_MASTERS):
            for name, (master, dtype) in masters.named.items():
                masters.named[name] = (master, fn(torch.empty(0, dtype=dtype)).dtype)


def lower(module: nn.Module, args: tuple[Any, ...]) -> Any:
    """Cast the parameters, and the input of a projection, to the backbone's dtype: a pre-hook."""
    masters = module.__dict__[_MASTERS]
    if not torch.compiler.is_compiling():
        masters.find(module)
    copies = {name: _copy_for_all(*master) for name, master in masters.named.items()}
    if torch.compiler.is_compiling():
        module._parameters.update(copies)
    else:
        with _EXCHANGE:
            masters.calls.add(threading.get_ident())
            module._parameters.update(copies)
    if is_projection(module) and args and isinstance(args[0], Tensor):
        return (args[0].to(next(iter(copies.values())).dtype), *args[1:])
    return args


def put_back(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Restore the fp32 parameters after the last of the overlapping calls: a forward hook."""
    masters = module.__dict__[_MASTERS]
    originals = {name: master for name, (master, _) in masters.named.items()}
    if torch.compiler.is_compiling():
        module._parameters.update(originals)
        return
    with _EXCHANGE:
        masters.calls.discard(threading.get_ident())
        if not masters.calls:
            module._parameters.update(originals)


def _copy_for_all(master: nn.Parameter, dtype: torch.dtype) -> Any:
    """Cast a parameter; only other threads may use the copy to compute gradients."""
    if torch.compiler.is_compiling():
        return master.to(dtype)
    with torch.inference_mode(False), torch.enable_grad():
        return master.to(dtype)


def raise_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cast the input of a task head to its dtype, fp32 unless it was converted: its pre-hook."""
    dtype = next(module.parameters()).dtype
    named = {name: _cast(value, dtype) for name, value in kwargs.items()}
    return tuple(_cast(value, dtype) for value in args), named


def _cast(value: Any, dtype: torch.dtype) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if floating else value

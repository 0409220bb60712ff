"""Trained parameters in fp32 on a backbone of a shorter dtype.

A small update is lost in bf16 or fp16: the rounding of the number under it is larger. So what
trains is kept in fp32, and where the backbone computes in a shorter dtype the module that holds it
gets a copy in that dtype for the time of a call. A task head computes in fp32.

Hooks are plain functions that find what they need on the module, so that a model with adapters on
it can be copied, pickled and moved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adapterhub.anatomy.projections import is_projection

_MASTERS = "_adapterhub_masters"


@dataclass
class Masters:
    """On a module: its trained fp32 parameters, and the dtype of those that they stand in for."""

    named: dict[str, tuple[nn.Parameter, torch.dtype]] = field(default_factory=dict)
    handles: list[RemovableHandle] = field(default_factory=list)


def hold_in_fp32(module: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Let a module compute with a parameter in another dtype than that in which it is kept."""
    masters = module.__dict__.get(_MASTERS)
    if masters is None:
        masters = module.__dict__[_MASTERS] = Masters()
        masters.handles = [
            module.register_forward_pre_hook(lower, prepend=True),
            module.register_forward_hook(put_back, prepend=True, always_call=True),
        ]
    masters.named[name] = (module.get_parameter(name), dtype)


def release_from_fp32(module: nn.Module, name: str) -> None:
    """With the last one that is held the module is as it was; one that is not held is no matter."""
    masters = module.__dict__.get(_MASTERS)
    if masters is None or masters.named.pop(name, None) is None or masters.named:
        return
    for handle in masters.handles:
        handle.remove()
    del module.__dict__[_MASTERS]


def lower(module: nn.Module, args: tuple[Any, ...]) -> Any:
    """The pre-hook: the module's trained parameters, and the input of a projection, in the dtype of
    the backbone."""
    dtypes = set()
    for name, (master, dtype) in module.__dict__[_MASTERS].named.items():
        module._parameters[name] = master.to(dtype)
        dtypes.add(dtype)
    if is_projection(module) and args and isinstance(args[0], Tensor):
        return (args[0].to(dtypes.pop()), *args[1:])
    return args


def put_back(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """The hook: the module has its own parameters again."""
    for name, (master, _) in module.__dict__[_MASTERS].named.items():
        module._parameters[name] = master


def raise_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The pre-hook of an fp32 task head on a backbone of a shorter dtype."""
    return tuple(map(_raised, args)), {name: _raised(value) for name, value in kwargs.items()}


def _raised(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.float() if floating else value

"""Find reversible layers: an autograd function of their own computes all of them (Reformer)."""

from __future__ import annotations

import inspect

import torch
from torch import nn


def reversible_stack(model: nn.Module, layer: str) -> nn.Module | None:
    """Return the module around a layer that computes its layers in an autograd function.

    Returns:
        None if autograd sees each operation of the layers, as in nearly all models.
    """
    names = layer.split(".")
    around = (model.get_submodule(".".join(names[:n])) for n in range(len(names)))
    return next((module for module in around if _names_function(module)), None)


def _names_function(module: nn.Module) -> bool:
    """Return whether the forward of a module's class names an autograd function."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    named = [forward.__globals__.get(name) for name in code.co_names] if code else []
    return any(isinstance(n, type) and issubclass(n, torch.autograd.Function) for n in named)

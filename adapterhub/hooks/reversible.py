"""Train in reversible layers, whose gradients an autograd function over all of them computes.

They keep no activations: in the backward of the function they are computed again, and give their
parameters gradients. Autograd calls it only if an input of the function requires a gradient, which
the states above frozen embeddings do not; and the layers assert that they are in training mode, in
which they have noted the seeds of their dropout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adapterhub.anatomy.forward_source import reversible_stack
from adapterhub.anatomy.sites import Anatomy
from adapterhub.patch import Patch


def require_input_gradients(anatomy: Anatomy, patch: Patch) -> None:
    """Let the inputs of reversible layers require gradients wherever something in them trains."""
    for stack, _ in _reversible(anatomy):
        patch.hook(stack.register_forward_pre_hook, _require_gradient, with_kwargs=True)


def keep_training(anatomy: Anatomy) -> None:
    """Set reversible layers to training mode; modules in them, as dropout, stay as they are."""
    for _, layers in _reversible(anatomy):
        for path in layers:
            anatomy.model.get_submodule(path).training = True


def is_reversible(anatomy: Anatomy) -> bool:
    """Return whether a backbone has reversible layers."""
    return bool(_reversible(anatomy))


def _reversible(anatomy: Anatomy) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """List the stacks of reversible layers with the paths of the layers."""
    found = []
    for paths in anatomy.layers.values():
        stack = reversible_stack(anatomy.model, paths[0]) if paths else None
        found += [(stack, paths)] if stack is not None else []
    return found


def _require_gradient(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Pass states that require a gradient: a forward pre-hook."""
    if not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters()):
        return None
    return tuple(map(_anchored, args)), {name: _anchored(value) for name, value in kwargs.items()}


def _anchored(value: Any) -> Any:
    """Return states, (batch, tokens, d), so that they require a gradient; others as they are."""
    states = isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3
    return value.detach().requires_grad_() if states and not value.requires_grad else value

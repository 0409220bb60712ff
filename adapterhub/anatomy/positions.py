"""The module of a stack that accepts the positions of its tokens."""

from __future__ import annotations

import inspect

from torch import nn


def position_module(root: nn.Module) -> nn.Module | None:
    """Return the module of a stack to which token positions can be passed; None if there is none.

    The stack's root, if its forward takes `position_ids`; otherwise its table of positions, if that
    takes `position_ids` and `past_key_values_length`, as in BART.
    """
    if "position_ids" in _parameters(root):
        return root
    names = {"position_ids", "past_key_values_length"}
    return next((m for m in root.children() if names <= _parameters(m)), None)


def _parameters(module: nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)

"""Which module of a stack is told the positions of its tokens."""

from __future__ import annotations

import inspect

from torch import nn


def taker_of_positions(root: nn.Module) -> nn.Module | None:
    """The stack itself where its forward takes `position_ids`; else its table of positions, where
    that takes them or the number of tokens before, as in BART; None: nobody can be told."""
    if "position_ids" in _parameters(root):
        return root
    wanted = {"position_ids", "past_key_values_length"}
    return next((m for m in root.children() if wanted <= _parameters(m)), None)


def _parameters(module: nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)

"""The modules of a stack that accept the positions of its tokens, or count them."""

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


def padding_table(root: nn.Module) -> nn.Module | None:
    """Return the table of a stack that counts positions from padding ids, as in M2M-100, or None.

    Without ids it takes embeddings, in which it finds no padding.
    """
    names = {"input_ids", "inputs_embeds", "past_key_values_length"}
    return next((m for m in root.children() if names == _parameters(m)), None)


def _parameters(module: nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)

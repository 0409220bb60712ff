"""The modules of a model or a stack that embed its tokens, and that accept or count positions."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def token_table(module: nn.Module) -> Any | None:
    """Return the module that embeds tokens; None if there is none or it cannot be determined.

    It is a table with one row per token, or another module in its place (of pixels or sound).
    """
    find = getattr(module, "get_input_embeddings", None)
    try:
        table = find() if find is not None else getattr(module, "embed_tokens", None)
    except (NotImplementedError, AttributeError):
        return None
    return table


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

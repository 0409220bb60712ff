"""The module that embeds the tokens of a model or of one of its stacks."""

from __future__ import annotations

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

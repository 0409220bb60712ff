"""The frozen head of a language model in front of a view of its states."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.patch import Patch


def keep_states_whole(model: PreTrainedModel, patch: Patch) -> None:
    """Give the frozen head of a language model whole tensors, not views of the last position.

    In front of a frozen weight torch multiplies such a view, (batch, 1, d), row by row, and on a
    CPU copies the weight for each: batch * vocabulary * d numbers, in bf16 in hundreds of times
    the time.
    """
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        patch.hook(head.register_forward_pre_hook, whole_states)


def whole_states(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Pass states that are contiguous: a forward pre-hook."""
    whole = bool(args) and isinstance(args[0], Tensor) and not args[0].is_contiguous()
    return (args[0].contiguous(), *args[1:]) if whole else None

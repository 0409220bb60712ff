"""Prefixes among relative positions, where attention adds a bias of them to its scores (T5).

    b_ij = table[bucket(k_j - q_i)]     k_j: the position of key j    q_i: that of query i

By default a prefix takes no position, and its keys have no bias. One with `positions` takes 0 to
L - 1, and the keys of tokens count on from there: k_j = L + j. Where it is true queries do so too,
q_i = L + i, and tokens see each other as without it; where it is `keys` they do not: q_i = i.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import CHILD
from adapterhub.hooks.slot import Slot


class RelativeBias:
    """The bias of one attention: the module that computes it, and how many tokens the KV cache held
    before this forward pass."""

    def __init__(self, source: nn.Module) -> None:
        self.source: Any = source
        self.past: Any = 0

    def widen(self, own: Tensor, lengths: Mapping[str, int], slot: Slot) -> Tensor:
        """own: (1, heads, queries, keys) -> the same over these prefixes too: `lengths` in tokens,
        each prefix in front of those before it."""
        counts = {n: c for n in lengths if (c := getattr(slot.placed(n), "positions", False))}
        total = sum(lengths[name] for name in counts)
        skipped = sum(lengths[name] for name, count in counts.items() if count is True)
        bias = self.source.compute_bias(
            own.shape[2],
            total + own.shape[3],
            device=own.device,
            past_seen_tokens=self.past + skipped,
        ).to(own.dtype)
        columns, end = [bias[..., total:]], total
        for name, length in lengths.items():
            if name in counts:
                columns.insert(0, bias[..., end - length : end])
                end -= length
            else:
                columns.insert(0, own.new_zeros(*own.shape[:3], length))
        return torch.cat(columns, dim=-1)


def note_past(host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The pre-hook of an attention with relative positions."""
    slot, cache = host._modules[CHILD], kwargs.get("past_key_values")
    past = 0 if cache is None else cache.get_seq_length(host.layer_idx)
    # A static cache counts on in place while the attention runs.
    slot.bias.past = past.clone() if isinstance(past, Tensor) else past  # type: ignore[union-attr]

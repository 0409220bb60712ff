"""Relative positions of prefixes, where attention adds a bias of them to its scores (T5).

    b_ij = table[bucket(k_j - q_i)]     k_j: the position of key j    q_i: that of query i

By default a prefix has no positions, and its keys no bias. With `positions` it has 0 to L - 1, and
the keys of tokens continue from there: k_j = L + j. With `positions=True` queries do too,
q_i = L + i, so that the bias between tokens is unchanged; with `positions="keys"` they do not:
q_i = i.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import CHILD
from adapterhub.hooks.slot import Slot
from adapterhub.methods._site_module import Positions, PrefixModule

_PAST = "past"


class RelativeBias:
    """The bias of one attention, and the module that computes it."""

    def __init__(self, source: nn.Module) -> None:
        self.source: Any = source

    def widen(self, bias: Tensor, lengths: Mapping[str, int], slot: Slot) -> Tensor:
        """Extend the bias to keys of prefixes.

        `bias`: (1, heads, queries, keys). Each prefix stands in front of those before it.

        Returns:
            (1, heads, queries, prefix tokens + keys).
        """
        positions = {name: _positions(slot.placed(name)) for name in lengths}
        total = sum(length for name, length in lengths.items() if positions[name])
        shift = sum(length for name, length in lengths.items() if positions[name] is True)
        wide = self.source.compute_bias(
            bias.shape[2],
            total + bias.shape[3],
            device=bias.device,
            past_seen_tokens=slot.kept(_PAST, 0) + shift,
        ).to(bias.dtype)
        columns, end = [wide[..., total:]], total
        for name, length in lengths.items():
            if positions[name]:
                columns.insert(0, wide[..., end - length : end])
                end -= length
            else:
                columns.insert(0, bias.new_zeros(*bias.shape[:3], length))
        return torch.cat(columns, dim=-1)


def _positions(module: nn.Module) -> Positions:
    assert isinstance(module, PrefixModule)
    return module.positions


def note_past(host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Store how many tokens the KV cache holds: the pre-hook of an attention."""
    slot, cache = host._modules[CHILD], kwargs.get("past_key_values")
    assert isinstance(slot, Slot)
    past = 0 if cache is None else cache.get_seq_length(host.layer_idx)
    # A static cache counts on in place while the attention runs.
    slot.keep(_PAST, past.clone() if isinstance(past, Tensor) else past)

"""The slot of virtual tokens at a stack, and what one forward pass keeps of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from adapterhub.errors import SiteError
from adapterhub.hooks.prompt_checks import CachedPrompt
from adapterhub.hooks.slot import Slot
from adapterhub.hooks.virtual_tokens import VirtualTokenBatch, pad_left
from adapterhub.methods._site_module import EmbeddingModule

ADDED = "added"  # the name under which a pass keeps its AddedPrompt
OUTER = "outer"  # and its OuterInputs


@dataclass
class AddedPrompt:
    """What one forward pass of a stack keeps until its output loses the virtual positions."""

    length: int  # virtual tokens of a row
    tokens: int  # of the caller
    places: Tensor | None = None  # of the caller's tokens, (batch, tokens)
    ids: Tensor | None = None  # (batch, length + tokens), valid only as padding or not
    first: int = 0  # the position of the first token of the text


class OuterInputs(NamedTuple):
    """What a larger model around a stack was called with, see prompt.py."""

    mask: Tensor | None = None  # of the caller, (batch, tokens)
    positions: bool = False  # whether the caller gave any
    extended: bool = False  # whether mask and positions cover the virtual tokens already


class PromptSlot(Slot):
    """Collects the virtual tokens, or the positions to skip, of the active modules of a stack.

    Args:
        names: the parameters of the stack's `forward`, in order.
        padding_idx: the padding id from which the stack counts positions, or None.
        strips: whether the output loses the virtual positions.
        rotates: whether padding of shorter prompts becomes the last of a row (an encoder).
        counts: whether the stack takes positions by number.
        reads_ids: whether the model finds padding by token ids (positions, or the head).
    """

    def __init__(
        self,
        names: tuple[str, ...],
        padding_idx: int | None,
        strips: bool,
        rotates: bool,
        counts: bool,
        reads_ids: bool,
    ) -> None:
        super().__init__()
        self.names = names
        self.padding_idx = padding_idx
        self.strips = strips
        self.rotates = rotates
        self.counts = counts
        self.reads_ids = reads_ids
        self.window: int | None = None  # tokens in a sliding window
        self.table_padding: int | None = None  # the padding id of a table that counts from padding

    def placed(self, key: str) -> EmbeddingModule:
        """Return the module with a key."""
        module = super().placed(key)
        assert isinstance(module, EmbeddingModule)
        return module

    def forward(self, batch: int) -> VirtualTokenBatch:
        """Return the virtual tokens of all active prompts for a batch of this many rows."""
        keys, plan, _ = self.applied
        if plan is None or len(plan.groups) == 1:
            keys = plan.groups[0] if plan else keys
            prompt = torch.cat([self.placed(key)() for key in keys])
            return VirtualTokenBatch(prompt[None], None, self._skips_padding([keys])[0])
        copies = plan.copies(batch, self.where())
        parts = [[self.placed(key)() for key in group] for group in plan.groups]
        empty = next(part for part in parts if part)[0][:0]
        prompts = [torch.cat([empty, *part]) for part in parts]
        sizes = [size * copies for size in plan.sizes]
        padded, counts = pad_left(prompts, sizes)
        padding = None if counts is None else plan.join(counts, copies)
        flags = self._skips_padding(plan.groups)
        skips: Tensor | bool = flags[0]
        if len(set(flags)) > 1:
            rows = zip(flags, sizes, strict=True)
            each = [torch.full((n, 1), flag, device=empty.device) for flag, n in rows]
            skips = plan.join(each, copies)
        return VirtualTokenBatch(plan.join(padded, copies), padding, skips)

    def _skips_padding(self, groups: Sequence[tuple[str, ...]]) -> list[bool]:
        """Return for each group whether its prompts come behind padding."""
        prompts = self._prompts()
        kinds = [{self.placed(k).counts_padding for k in group if k in prompts} for group in groups]
        counting = [True in kind for kind in kinds]
        if any(len(kind) > 1 for kind in kinds) or (self.reads_ids and len(set(counting)) > 1):
            raise SiteError(
                "prompts that count padding as text are active together with other rows or prompts",
                expected="the same `counts_padding` in all prompts of a batch",
                hint="one batch for each kind: peft's prompts have counts_padding=true",
            )
        return [not flag for flag in counting]

    def _prompts(self) -> tuple[str, ...]:
        """Return the keys of the active modules that have virtual tokens."""
        return tuple(key for key in self.keys if not self.placed(key).skipped_positions)

    def record(self, length: int, tokens: int = 0, first: int = 0) -> CachedPrompt:
        """Describe the active prompts for a cache.

        `length` counts the virtual tokens of a row, `tokens` those that have a mask when the prompt
        enters; `first` is the position of the first token of the text.
        """
        return CachedPrompt(frozenset(self._prompts()), length, tokens, first)

    def skipped(self) -> int:
        """Return the number of positions left free in front of the tokens."""
        return sum(self.placed(key).skipped_positions for key in self.keys)

    def counts_padding(self) -> bool:
        """Return whether an active prompt counts padding as text."""
        return any(self.placed(key).counts_padding for key in self.keys)

"""The virtual tokens of a batch, their slot at a stack, and their places among the caller's tokens.

A prompt is next to its text: in a row with padding on the left, it comes behind the padding, so
that the row computes what it computes without padding. A prompt that counts padding as text
(`counts_padding`, as in peft) comes in front of it.

Where rows of a batch have prompts of different lengths, shorter ones are padded on the left, and
the mask hides the padding. An encoder may take positions from the order of its input alone, so
there this padding becomes the last of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterhub.errors import SiteError
from adapterhub.hooks.prompt_checks import CachedPrompt
from adapterhub.hooks.slot import Slot
from adapterhub.methods._site_module import EmbeddingModule

ADDED = "added"  # the name under which a pass keeps its AddedPrompt
OUTER = "outer"  # and its OuterInputs


@dataclass(frozen=True)
class VirtualTokenBatch:
    """The virtual tokens of a batch."""

    tokens: Tensor  # (batch or 1, length, d)
    padding: Tensor | None  # (batch, 1), padding tokens on the left of each row; None: in no row
    skips: Tensor | bool = True  # (batch, 1), whether the prompt comes behind the text's padding

    @property
    def length(self) -> int:
        """Tokens of a row, with padding."""
        return self.tokens.shape[1]

    def lead(self, mask: Tensor | None) -> Tensor | None:
        """Count the padding of each row that comes in front of its prompt.

        mask: (batch, tokens) -> (batch, 1); None: no row has any.
        """
        if not isinstance(mask, Tensor) or mask.ndim != 2 or self.skips is False:
            return None
        return mask.ne(0).cumsum(1).eq(0).sum(1, keepdim=True) * self.skips

    def places(self, tokens: int, lead: Tensor | None, padding_last: bool) -> Tensor | None:
        """Return the place of each virtual token and each token of the text in its row.

        `lead` is the padding in front of each row's prompt, (batch, 1), or None. `padding_last`:
        the padding of shorter prompts becomes the last of the row.

        Returns:
            (batch, length + tokens); None: virtual tokens first, in every row.
        """
        missing = self.padding
        if lead is None and missing is None:
            return None
        device = self.tokens.device
        start = torch.zeros(1, 1, dtype=torch.long, device=device) if lead is None else lead
        virtual, text = (torch.arange(n, device=start.device)[None] for n in (self.length, tokens))
        first, behind = start + virtual, text + self.length
        if missing is not None and padding_last:
            missing = missing.to(start.device)
            last = self.length + tokens - missing + virtual
            first, behind = torch.where(virtual < missing, last, first - missing), behind - missing
        second = torch.where(text < start, text, behind)
        rows = max(len(first), len(second), 1 if missing is None else len(missing))
        return torch.cat([first.expand(rows, -1), second.expand(rows, -1)], dim=1)

    def widen(self, mask: Tensor, places: Tensor | None) -> Tensor:
        """Extend a mask over the caller's tokens to the virtual tokens.

        `mask`: (batch, tokens); `places`: those of all tokens.
        """
        if self.padding is None:
            return arranged(F.pad(mask, (self.length, 0), value=1), places)
        visible = torch.arange(self.length, device=mask.device) >= self.padding.to(mask.device)
        return arranged(torch.cat([visible.to(mask.dtype), mask], dim=1), places)

    def widen_pairs(self, mask: Tensor, entering: bool, window: int | None = None) -> Tensor:
        """Extend a mask over pairs of a causal stack's tokens to the virtual tokens, in front.

        `mask`: (batch or 1, heads or 1, queries, keys), bool or added to the scores. `entering`:
        the virtual tokens are queries too. `window` is how many keys a query attends to, where that
        is part of the mask.
        """
        number = torch.arange(self.length, device=mask.device)
        padding = 0 if self.padding is None else self.padding.to(mask.device)
        shown = (number >= padding).expand(len(self.tokens), -1)
        rows = max(len(mask), len(shown))
        query = torch.arange(mask.shape[-1] - mask.shape[-2], mask.shape[-1], device=mask.device)
        near = self.length + query[:, None] - number < (window or torch.inf)
        keys = as_mask(shown[:, None, None] & near, mask).expand(rows, mask.shape[1], -1, -1)
        widened = torch.cat([keys, mask.expand(rows, -1, -1, -1)], dim=-1)
        if not entering:
            return widened
        # Padding attends to itself: no query is left without a key.
        back = number[:, None] - number
        own = (shown[:, None] & (back >= 0) & (back < (window or torch.inf))) | (back == 0)
        queries = as_mask(F.pad(own, (0, mask.shape[-1]))[:, None], mask)
        return torch.cat([queries.expand(rows, mask.shape[1], -1, -1), widened], dim=2)


def as_mask(visible: Tensor, like: Tensor) -> Tensor:
    """Write what is visible as another mask does: bool, or added to the scores."""
    if like.dtype == torch.bool:
        return visible
    hidden = torch.finfo(like.dtype).min
    return torch.zeros_like(visible, dtype=like.dtype).masked_fill(~visible, hidden)


def arranged(rows: Tensor, places: Tensor | None, dim: int = 1) -> Tensor:
    """Move the tokens of each row to their places.

    `rows`: (batch or 1, tokens, ...), or (..., batch or 1, tokens) with `dim` -1; `places`: (batch,
    tokens), None: leave them.
    """
    if places is None:
        return rows
    return gathered(rows, places.argsort(1), dim)


def gathered(rows: Tensor, numbers: Tensor, dim: int = 1) -> Tensor:
    """Return the tokens with these numbers.

    `rows`: as in `arranged`; `numbers`: (batch, n).
    """
    numbers = numbers.to(rows.device)
    if dim == -1:
        shape = (*rows.shape[:-2], len(numbers), rows.shape[-1])
        return rows.expand(shape).gather(-1, numbers.expand(*shape[:-1], -1))
    numbers = numbers.view(*numbers.shape, *(1,) * (rows.ndim - 2))
    rows = rows.expand(len(numbers), *rows.shape[1:])
    return rows.gather(1, numbers.expand(-1, -1, *rows.shape[2:]))


def pad_left(
    prompts: Sequence[Tensor], sizes: Sequence[int]
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Pad the prompts of groups of rows to one length.

    `prompts`: (length, d) of each group; `sizes`: rows of each group.

    Returns:
        (rows, longest, d) of each group, and the number of padding tokens, (rows, 1) of each group;
        None if no prompt is shorter than another.
    """
    longest = max(map(len, prompts))
    missing = [longest - len(prompt) for prompt in prompts]
    padded = [
        F.pad(prompt, (0, 0, n, 0)).expand(size, -1, -1)
        for prompt, n, size in zip(prompts, missing, sizes, strict=True)
    ]
    if not any(missing):
        return padded, None
    device = prompts[0].device
    counts = zip(missing, sizes, strict=True)
    return padded, [torch.full((size, 1), n, device=device) for n, size in counts]


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

    def stack(self) -> str:
        """Return the name of the stack."""
        return next(iter(self.sites.values())).stack

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

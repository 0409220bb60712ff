"""The inputs of a stack with a prompt in front of each text: embeddings, mask and positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.errors import SiteError
from adapterhub.hooks.prompt_checks import (
    cached_prompt,
    check_cached_padding,
    check_cached_positions,
    check_cached_prompt,
    check_other_inputs,
    check_packed_rows,
    check_prompt_mask,
    check_static_room,
)
from adapterhub.hooks.prompt_slot import AddedPrompt, OuterInputs, PromptSlot
from adapterhub.hooks.virtual_tokens import VirtualTokenBatch, arranged

SLIDING = "sliding_attention"
_KINDS = ("full_attention", SLIDING)  # of layers whose masks are known, by transformers' names


def past_length(cache: Any) -> int:
    """Return the number of tokens in a KV cache, with virtual ones."""
    return 0 if cache is None else int(cache.get_seq_length())


@dataclass
class PromptedInputs:
    """The inputs of one call of a stack, by name, which `extend` changes.

    `before` is the number of the caller's tokens in the cache; `enters` whether the prompt enters
    with this call; `lead` the padding in front of each row's prompt, (batch, 1), None without;
    `start` the same, also where the mask is one over pairs, with the prompt in front of padding.
    `outer` has the inputs of a larger model around the stack, if there is one.
    """

    values: dict[str, Any]
    slot: PromptSlot
    outer: OuterInputs | None = None
    virtual: VirtualTokenBatch = field(init=False)
    source: Tensor = field(init=False)  # ids or embeddings, (batch, tokens, ...)
    before: int = field(init=False)
    enters: bool = field(init=False)
    lead: Tensor | None = field(init=False)
    start: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        ids = self.values.get("input_ids")
        self.source = self.values["inputs_embeds"] if ids is None else ids
        self.virtual = self.slot(len(self.source))
        past = past_length(self.values.get("past_key_values"))
        self._check(past)
        self.enters = self.virtual.length > 0 and not past
        self.before = past - self.virtual.length if past else 0
        if self.values.get("attention_mask") is None and self.virtual.padding is not None:
            tokens = self.before + self.source.shape[1]
            self.values["attention_mask"] = self.source.new_ones(
                len(self.source), tokens, dtype=torch.long
            )
        self.lead = self._lead()
        around = self.outer.mask if self.outer and self.enters else None
        self.start = self.virtual.lead(around) if self.lead is None else self.lead

    def extend(self, root: nn.Module) -> AddedPrompt | None:
        """Extend the inputs.

        Returns:
            What was added, if the prompt enters with this call.

        Raises:
            SiteError: inputs that cannot be extended; the error says which.
        """
        first = self._first_position()
        self.extend_mask_and_positions()
        if not self.enters:
            return None
        ids = self._padding_ids()
        self._put_in_front(root)
        tokens, length = self.source.shape[1], self.virtual.length
        places = self.virtual.places(tokens, self.lead, self.slot.rotates)
        self._arrange(places)
        places = None if places is None else places[:, length:]
        return AddedPrompt(length, tokens, places, ids, first)

    def _first_position(self) -> int:
        """Return the position that the caller gives to the first token of texts without padding."""
        positions, mask = self.values.get("position_ids"), self.values.get("attention_mask")
        mask = self.outer.mask if self.outer else mask
        if positions is None or positions.ndim != 2 or mask is not None:
            return 0
        return 0 if torch.compiler.is_compiling() else int(positions[0, 0])

    def extend_mask_and_positions(self) -> None:
        """Extend mask and positions: all that there is to extend behind a cache.

        Raises:
            SiteError: inputs that cannot be extended; the error says which.
        """
        self._shift_positions()
        self._widen_mask()

    def _check(self, past: int) -> None:
        slot, length, cache = self.slot, self.virtual.length, self.values.get("past_key_values")
        check_cached_prompt(cache, past, slot.record(length))
        if not length:
            return
        before = past - length if past else 0
        text = before + self.source.shape[1]
        inside = slot.window is None or text + length <= slot.window
        mask = self.values.get("attention_mask")
        # Without position_ids (ALiBi), a later text of a packed row is farther from the prompt.
        pairs = not slot.rotates and "position_ids" in slot.names
        for kind, each in mask.items() if isinstance(mask, dict) else ((None, mask),):
            check_prompt_mask(each, text, past, pairs and (inside or kind in _KINDS))
        check_static_room(cache, text + length, slot.window)
        if past:
            check_cached_positions(self.values, before, cached_prompt(cache).first)
        else:
            check_other_inputs(slot.names, self.values, self.source)
        if not slot.rotates:
            check_packed_rows(self.values, past)

    def _lead(self) -> Tensor | None:
        """Count the padding in front of each row's prompt, as it was when the prompt entered."""
        mask = self.values.get("attention_mask")
        lead = self.virtual.lead(mask) if self.virtual.length else None
        if lead is None or not self.before:
            return lead
        held = cached_prompt(self.values["past_key_values"])
        check_cached_padding(lead, self.before, held)
        return lead.clamp_max(held.tokens)

    def _widen_mask(self) -> None:
        mask = self.values.get("attention_mask")
        if mask is None or not self.virtual.length:
            return
        if isinstance(mask, dict):  # of each kind of layer
            windows = {SLIDING: self.slot.window}
            wide: Any = {
                kind: self._widened_pairs(each, windows.get(kind)) for kind, each in mask.items()
            }
        elif mask.ndim == 4:
            wide = self._widened_pairs(mask)
        else:
            places = self.virtual.places(mask.shape[1], self.lead, self.slot.rotates)
            wide = self.virtual.widen(mask, places)
        self.values["attention_mask"] = wide

    def _widened_pairs(self, mask: Tensor | None, window: int | None = None) -> Tensor | None:
        """Extend a mask over pairs; None is a causal one, of a text inside of any window."""
        tokens = self.source.shape[1]
        beyond = window is not None and tokens + self.virtual.length > window
        if mask is None and (beyond or self.virtual.padding is not None):
            pairs = torch.ones(tokens, tokens, dtype=torch.bool, device=self.source.device)
            mask = pairs.tril()[None, None]
        return None if mask is None else self.virtual.widen_pairs(mask, self.enters, window)

    def _put_in_front(self, root: nn.Module) -> None:
        tokens = self.values.pop("input_ids", None)
        embeds = self.values.get("inputs_embeds")
        if embeds is None:
            embeds = root.get_input_embeddings()(tokens)  # type: ignore[operator]
        if "per_layer_inputs" in self.slot.names:
            self._extend_layer_inputs(root, tokens)
        prompt = self.virtual.tokens.to(embeds.dtype).expand(len(embeds), -1, -1)
        self.values["inputs_embeds"] = torch.cat([prompt, embeds], dim=1)
        if self.values.get("token_type_ids") is not None:
            types = self.values["token_type_ids"]
            self.values["token_type_ids"] = F.pad(types, (prompt.shape[1], 0))

    def _extend_layer_inputs(self, root: Any, tokens: Tensor | None) -> None:
        """Compute what a stack adds in each layer by token id; virtual tokens have no id: zeros."""
        inputs = self.values.get("per_layer_inputs")
        if inputs is None and tokens is not None and root.hidden_size_per_layer_input:
            inputs = root.get_per_layer_inputs(tokens)
        if inputs is not None:
            padding = inputs.new_zeros(len(inputs), self.virtual.length, *inputs.shape[2:])
            self.values["per_layer_inputs"] = torch.cat([padding, inputs], dim=1)

    def _padding_ids(self) -> Tensor | None:
        """Return ids with the padding of text and prompts, for a table that counts from padding."""
        ids, padding_idx = self.values.get("input_ids"), self.slot.table_padding
        if padding_idx is None or ids is None or self.slot.counts_padding():
            return None
        places = self.virtual.places(ids.shape[1], self.lead, self.slot.rotates)
        return padding_idx + self.virtual.widen(ids.ne(padding_idx), places).long()

    def _arrange(self, places: Tensor | None) -> None:
        if places is None:
            return
        for name in ("inputs_embeds", "token_type_ids", "per_layer_inputs"):
            if self.values.get(name) is not None:
                self.values[name] = arranged(self.values[name], places)
        if self.values.get("position_ids") is not None:
            self.values["position_ids"] = arranged(self.values["position_ids"], places, dim=-1)

    def _shift_positions(self) -> None:
        """Give positions to the virtual tokens, and to the caller's tokens behind them."""
        slot, length = self.slot, self.virtual.length
        skipped = slot.skipped() if "position_ids" in slot.names else 0
        positions, start = self.values.get("position_ids"), None
        if positions is None and self._must_count(skipped):
            positions, by_order = self._counted()
            start = self.start if by_order else None
        elif positions is not None and self._numbered_around(positions):
            start = self.start
        if positions is None:
            return
        first = 0 if slot.padding_idx is None else slot.padding_idx + 1
        padding: Any = self.virtual.padding
        padding = 0 if padding is None else padding.to(positions.device)
        shifted = positions + length + skipped - padding
        if positions.ndim < 3:
            shifted = torch.where(positions < first, positions, shifted)
        if self.enters:
            numbers = torch.arange(length, device=positions.device)[None] - padding
            numbers = first + skipped + numbers.clamp_min(0) + (0 if start is None else start)
            rows = max(len(numbers), shifted.shape[-2])
            pair = [part.expand(*shifted.shape[:-2], rows, -1) for part in (numbers, shifted)]
            shifted = torch.cat(pair, dim=-1)
        self.values["position_ids"] = shifted

    def _must_count(self, skipped: int) -> bool:
        """Return whether the stack itself would give other numbers to the caller's tokens."""
        slot = self.slot
        from_padding = slot.padding_idx is not None and not slot.counts_padding()
        if from_padding and self.values.get("input_ids") is not None:
            return True
        padded = self.virtual.padding is not None
        behind = self.lead is None and self.start is not None  # padding behind the prompt
        return bool(skipped) or ((padded or behind) and slot.counts and not slot.rotates)

    def _numbered_around(self, positions: Tensor) -> bool:
        """Return whether a module around the stack numbered the caller's tokens by their order."""
        outer = self.outer
        if outer is None or outer.positions or positions.ndim != 2 or torch.compiler.is_compiling():
            return False
        order = torch.arange(positions.shape[1], device=positions.device)
        return bool((positions == order).all())

    def _counted(self) -> tuple[Tensor, bool]:
        """Count the positions of the caller's tokens as the backbone does.

        Returns:
            (batch or 1, tokens), and whether they were counted by order.
        """
        slot = self.slot
        if "position_ids" not in slot.names:
            raise SiteError(
                f"{slot.where()} takes no positions: prompts in one batch need equal lengths",
                hint="use prompts of one length, or one batch for each length",
            )
        ids, mask = self.values.get("input_ids"), self.values.get("attention_mask")
        tokens = self.source.shape[1]
        if slot.padding_idx is not None and ids is not None and not slot.counts_padding():
            real = ids.ne(slot.padding_idx).long()
            return real.cumsum(1) * real + slot.padding_idx, False
        if not slot.counts and isinstance(mask, Tensor) and mask.ndim == 2:
            visible = mask.long()
            return (visible.cumsum(1) * visible - 1)[:, -tokens:], False
        first = self.before + (0 if slot.padding_idx is None else slot.padding_idx + 1)
        return torch.arange(first, first + tokens, device=self.source.device)[None], True

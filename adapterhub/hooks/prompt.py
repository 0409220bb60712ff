"""Virtual tokens enter a stack as embeddings in front of the caller's tokens.

A pre-hook on the stack replaces `input_ids` by embeddings, puts the prompt in front and widens the
mask, the positions and the token types; a hook on the output removes the virtual positions, so that
outputs have the length of the caller's input. Where a decoder attends to the stack, the virtual
positions are kept for it, as in Lester et al. 2021, and its mask is widened instead. With a KV
cache the prompt enters once, with the first tokens. `virtual_tokens.py` has the places of prompts
in padded batches, `prompt_checks.py` the inputs that are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.anatomy.positions import padding_table, position_module
from adapterhub.anatomy.sites import CHILD, Anatomy, Site
from adapterhub.errors import SiteError
from adapterhub.hooks.prompt_checks import (
    CachedPrompt,
    cached_prompt,
    check_cached_padding,
    check_cached_positions,
    check_cached_prompt,
    check_other_inputs,
    check_packed_rows,
    check_prompt_mask,
    check_static_room,
    remember_prompt,
)
from adapterhub.hooks.slot import Slot
from adapterhub.hooks.virtual_tokens import VirtualTokenBatch, arranged, gathered, pad_left
from adapterhub.methods._site_module import EmbeddingModule

_PROMPT = "_adapterhub_prompt"
_ADDED, _PLACES = "added", "places"
_WINDOWS = ("sliding_window", "window_size")
_SEQUENCES = ("last_hidden_state", "hidden_states")
_ENCODER_SEQUENCES = ("encoder_last_hidden_state", "encoder_hidden_states")


@dataclass
class AddedPrompt:
    """What one forward pass of a stack keeps until its output loses the virtual positions."""

    length: int  # virtual tokens of a row
    tokens: int  # of the caller
    places: Tensor | None = None  # of the caller's tokens, (batch, tokens)
    ids: Tensor | None = None  # (batch, length + tokens), valid only as padding or not


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

    def record(self, length: int, tokens: int = 0) -> CachedPrompt:
        """Describe the active prompts for a cache.

        Args:
            length: the virtual tokens of a row.
            tokens: the tokens that have a mask when the prompt enters.
        """
        return CachedPrompt(frozenset(self._prompts()), length, tokens)

    def skipped(self) -> int:
        """Return the number of positions left free in front of the tokens."""
        return sum(self.placed(key).skipped_positions for key in self.keys)

    def counts_padding(self) -> bool:
        """Return whether an active prompt counts padding as text."""
        return any(self.placed(key).counts_padding for key in self.keys)


def prompt_slot(anatomy: Anatomy, site: Site) -> PromptSlot:
    """Return the slot at a stack; create it with its hooks if this is the first prompt."""
    model = anatomy.model
    root = model.get_submodule(site.host)
    slot = root._modules.get(CHILD)
    if isinstance(slot, PromptSlot):
        return slot
    names = tuple(inspect.signature(root.forward).parameters)
    feeds_decoder = site.stack == "encoder" and "decoder" in anatomy.stacks
    config: Any = getattr(root, "config", model.config)
    padding_idx = config.pad_token_id if anatomy.family.positions_from_padding else None
    pooled, table = site.stack == "decoder" and bool(anatomy.head()), padding_table(root)
    slot = PromptSlot(
        names,
        padding_idx,
        strips=not feeds_decoder,
        # BERT with is_decoder=True is an encoder by its row, and attends as a decoder.
        rotates=site.stack == "encoder" and not getattr(config, "is_decoder", False),
        counts=not anatomy.family.positions_follow_mask,
        reads_ids=pooled or padding_idx is not None or table is not None,
    )
    slot.handles.append(root.register_forward_pre_hook(add_prompt, with_kwargs=True))
    slot.handles.append(root.register_forward_hook(strip_prompt, with_kwargs=True))
    if pooled:
        slot.handles.append(_pre_hook(model, slot, hide_ids))
    if feeds_decoder:
        decoder = model.get_submodule(anatomy.path(anatomy.stacks["decoder"].root))
        slot.handles.append(_pre_hook(decoder, slot, widen_encoder_mask))
        slot.handles.append(_output_hook(model, slot, strip_encoder_output))
    if body := anatomy.stacks[site.stack].body:
        slot.handles.append(_output_hook(root.get_submodule(body), slot, strip_body))
    if (taker := position_module(root)) is not None and taker is not root:
        slot.handles.append(_pre_hook(taker, slot, skip_positions))
    slot.window = next((w for n in _WINDOWS if (w := getattr(config, n, None))), None)
    if table is not None:
        slot.table_padding = table.padding_idx  # type: ignore[assignment]
        slot.handles.append(_pre_hook(table, slot, show_padding))
    root.add_module(CHILD, slot)
    return slot


def skip_positions(table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Leave positions free: the pre-hook of a table of positions."""
    (slot,) = getattr(table, _PROMPT)
    skipped = slot.skipped()
    if not skipped:
        return args, kwargs
    if kwargs.get("position_ids") is not None:
        return args, kwargs | {"position_ids": kwargs["position_ids"] + skipped}
    return args[:1], kwargs | {"past_key_values_length": skipped + sum(args[1:2])}


def show_padding(table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pass ids in which padding is found: the pre-hook of a table that counts from padding."""
    (slot,) = getattr(table, _PROMPT)
    added: AddedPrompt | None = slot.kept(_ADDED)
    if added is None or added.ids is None:
        return args, kwargs
    names = ("input_ids", "inputs_embeds", "past_key_values_length")
    kwargs = dict(zip(names, args, strict=False)) | kwargs
    return (), kwargs | {"input_ids": added.ids, "inputs_embeds": None}


def _pre_hook(module: nn.Module, slot: PromptSlot, hook: Any) -> Any:
    setattr(module, _PROMPT, [slot])
    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _output_hook(module: nn.Module, slot: PromptSlot, hook: Any) -> Any:
    setattr(module, _PROMPT, [slot])
    return module.register_forward_hook(hook)


def _past_length(cache: Any) -> int:
    return 0 if cache is None else int(cache.get_seq_length())


def hide_ids(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pass embeddings to a model whose head finds padding by ids: the pre-hook of the model."""
    (slot,) = getattr(model, _PROMPT)
    ids = args[0] if args else kwargs.get("input_ids")
    if ids is None or not slot.counts_padding():
        return args, kwargs
    embeds = model.get_input_embeddings()(ids)  # type: ignore[operator]
    return (None, *args[1:]), {k: v for k, v in kwargs.items() if k != "input_ids"} | {
        "inputs_embeds": embeds
    }


def add_prompt(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put the prompt in front and widen mask, positions and token types: a stack's pre-hook."""
    slot = root._modules[CHILD]
    if not isinstance(slot, PromptSlot):
        return None
    slot.take(_ADDED)
    inputs = dict(zip(slot.names[: len(args)], args, strict=True)) | kwargs
    past = _past_length(inputs.get("past_key_values"))
    if not slot.keys:
        check_cached_prompt(inputs.get("past_key_values"), past, CachedPrompt())
        return None
    ids = inputs.get("input_ids")
    source = inputs["inputs_embeds"] if ids is None else ids
    virtual = slot(len(source))
    _check_inputs(inputs, slot, virtual, past)
    adds = virtual.length > 0 and not past
    before = past - virtual.length if past else 0  # the caller's tokens in the cache
    if inputs.get("attention_mask") is None and virtual.padding is not None:
        inputs["attention_mask"] = source.new_ones(
            len(source), before + source.shape[1], dtype=torch.long
        )
    lead = _lead(inputs, virtual, before)
    skipped = slot.skipped() if "position_ids" in slot.names else 0
    _shift_positions(inputs, slot, virtual, before, skipped, lead, adds)
    _widen_mask(inputs, slot, virtual, lead, adds)
    if adds:
        ids = _padding_ids(inputs.get("input_ids"), slot, virtual, lead)
        _put_in_front(root, inputs, virtual)
        places = virtual.places(source.shape[1], lead, slot.rotates)
        _arrange_inputs(inputs, places)
        kept = None if places is None else places[:, virtual.length :]
        slot.keep(_ADDED, AddedPrompt(virtual.length, source.shape[1], kept, ids))
    return (), inputs


def _check_inputs(
    inputs: dict[str, Any], slot: PromptSlot, virtual: VirtualTokenBatch, past: int
) -> None:
    cache = inputs.get("past_key_values")
    check_cached_prompt(cache, past, slot.record(virtual.length))
    if not virtual.length:
        return
    ids = inputs.get("input_ids")
    source = inputs["inputs_embeds"] if ids is None else ids
    before = past - virtual.length if past else 0
    text = before + source.shape[1]
    inside = slot.window is None or text + virtual.length <= slot.window
    check_prompt_mask(inputs.get("attention_mask"), text, past, not slot.rotates and inside)
    check_static_room(cache, text + virtual.length, slot.window)
    if past:
        check_cached_positions(inputs, before)
    else:
        check_other_inputs(slot.names, inputs, source)
    if not slot.rotates:
        check_packed_rows(inputs, past)


def _lead(inputs: dict[str, Any], virtual: VirtualTokenBatch, before: int) -> Tensor | None:
    """Count the padding in front of each row's prompt, as it was when the prompt entered."""
    lead = virtual.lead(inputs.get("attention_mask")) if virtual.length else None
    if lead is None or not before:
        return lead
    held = cached_prompt(inputs["past_key_values"])
    check_cached_padding(lead, before, held)
    return lead.clamp_max(held.tokens)


def _widen_mask(
    inputs: dict[str, Any],
    slot: PromptSlot,
    virtual: VirtualTokenBatch,
    lead: Tensor | None,
    adds: bool,
) -> None:
    mask = inputs.get("attention_mask")
    if mask is None or not virtual.length:
        return
    if mask.ndim == 4:
        inputs["attention_mask"] = virtual.widen_pairs(mask, entering=adds)
    else:
        places = virtual.places(mask.shape[1], lead, slot.rotates)
        inputs["attention_mask"] = virtual.widen(mask, places)


def _put_in_front(root: nn.Module, inputs: dict[str, Any], virtual: VirtualTokenBatch) -> None:
    tokens = inputs.pop("input_ids", None)
    embeds = inputs.get("inputs_embeds")
    if embeds is None:
        embeds = root.get_input_embeddings()(tokens)  # type: ignore[operator]
    prompt = virtual.tokens.to(embeds.dtype).expand(len(embeds), -1, -1)
    inputs["inputs_embeds"] = torch.cat([prompt, embeds], dim=1)
    if inputs.get("token_type_ids") is not None:
        inputs["token_type_ids"] = F.pad(inputs["token_type_ids"], (prompt.shape[1], 0))


def _padding_ids(
    ids: Tensor | None, slot: PromptSlot, virtual: VirtualTokenBatch, lead: Tensor | None
) -> Tensor | None:
    """Return ids with the padding of text and prompts, for a table that counts from padding."""
    padding_idx = slot.table_padding
    if padding_idx is None or ids is None or slot.counts_padding():
        return None
    real = virtual.widen(ids.ne(padding_idx), virtual.places(ids.shape[1], lead, slot.rotates))
    return padding_idx + real.long()


def _shift_positions(
    inputs: dict[str, Any],
    slot: PromptSlot,
    virtual: VirtualTokenBatch,
    before: int,
    skipped: int,
    lead: Tensor | None,
    adds: bool,
) -> None:
    """Give positions to the virtual tokens, and to the caller's tokens behind them."""
    positions, start = inputs.get("position_ids"), None
    if positions is None and _must_count(inputs, slot, virtual, skipped):
        positions, by_order = _counted(inputs, slot, before)
        start = lead if by_order else None
    if positions is None:
        return
    first = 0 if slot.padding_idx is None else slot.padding_idx + 1
    padding = 0 if virtual.padding is None else virtual.padding.to(positions.device)
    shifted = positions + virtual.length + skipped - padding
    if positions.ndim < 3:
        shifted = torch.where(positions < first, positions, shifted)
    if adds:
        numbers = torch.arange(virtual.length, device=positions.device)[None] - padding
        numbers = first + skipped + numbers.clamp_min(0) + (0 if start is None else start)
        rows = max(len(numbers), shifted.shape[-2])
        pair = [part.expand(*shifted.shape[:-2], rows, -1) for part in (numbers, shifted)]
        shifted = torch.cat(pair, dim=-1)
    inputs["position_ids"] = shifted


def _must_count(
    inputs: dict[str, Any], slot: PromptSlot, virtual: VirtualTokenBatch, skipped: int
) -> bool:
    """Return whether the stack itself would give other numbers to the caller's tokens."""
    from_padding = slot.padding_idx is not None and not slot.counts_padding()
    if from_padding and inputs.get("input_ids") is not None:
        return True
    return bool(skipped) or (virtual.padding is not None and slot.counts and not slot.rotates)


def _counted(inputs: dict[str, Any], slot: PromptSlot, before: int) -> tuple[Tensor, bool]:
    """Count the positions of the caller's tokens as the backbone does.

    Returns:
        (batch or 1, tokens), and whether they were counted by order.
    """
    if "position_ids" not in slot.names:
        raise SiteError(
            f"{slot.where()} takes no positions: prompts in one batch need equal lengths",
            hint="use prompts of one length, or one batch for each length",
        )
    ids: Tensor | None = inputs.get("input_ids")
    mask: Tensor | None = inputs.get("attention_mask")
    source: Tensor = inputs["inputs_embeds"] if ids is None else ids
    if slot.padding_idx is not None and ids is not None and not slot.counts_padding():
        real = ids.ne(slot.padding_idx).long()
        return real.cumsum(1) * real + slot.padding_idx, False
    if not slot.counts and isinstance(mask, Tensor) and mask.ndim == 2:
        visible = mask.long()
        return (visible.cumsum(1) * visible - 1)[:, -source.shape[1] :], False
    first = before if slot.padding_idx is None else before + slot.padding_idx + 1
    return torch.arange(first, first + source.shape[1], device=source.device)[None], True


def _arrange_inputs(inputs: dict[str, Any], places: Tensor | None) -> None:
    if places is None:
        return
    for name in ("inputs_embeds", "token_type_ids"):
        if inputs.get(name) is not None:
            inputs[name] = arranged(inputs[name], places)
    if inputs.get("position_ids") is not None:
        inputs["position_ids"] = arranged(inputs["position_ids"], places, dim=-1)


def strip_prompt(
    root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """Remove the virtual positions, and record the prompt on a new cache: the hook of a stack."""
    slot = root._modules[CHILD]
    assert isinstance(slot, PromptSlot)
    added: AddedPrompt | None = slot.take(_ADDED)
    if added is None:
        return output
    values = output if isinstance(output, tuple) else tuple(output.values())
    masked = 0 if kwargs.get("attention_mask") is None else added.tokens
    for value in values:
        remember_prompt(value, slot.record(added.length, masked))
    return _strip(output, _SEQUENCES, added.tokens, added.places) if slot.strips else output


def strip_body(body: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Remove the virtual positions in front of a pooler: it reads the caller's first token."""
    (slot,) = getattr(body, _PROMPT)
    added: AddedPrompt | None = slot.kept(_ADDED)
    if added is None or not slot.strips:
        return output
    return _strip(output, _SEQUENCES, added.tokens, added.places)


def widen_encoder_mask(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Extend the mask over the encoder to its virtual tokens: the pre-hook of a decoder."""
    (slot,) = getattr(decoder, _PROMPT)
    states, mask = kwargs.get("encoder_hidden_states"), kwargs.get("encoder_attention_mask")
    slot.take(_PLACES)
    if not slot.keys or states is None:
        return args, kwargs
    virtual = slot(len(states))
    tokens = states.shape[1] - virtual.length
    if mask is None and virtual.padding is not None:
        mask = states.new_ones(len(states), tokens, dtype=torch.long)
    if mask is not None and mask.shape[1] < states.shape[1]:
        places = virtual.places(tokens, virtual.lead(mask), slot.rotates)
        slot.keep(_PLACES, None if places is None else places[:, virtual.length :])
        kwargs["encoder_attention_mask"] = virtual.widen(mask, places)
    return args, kwargs


def strip_encoder_output(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Remove the encoder's virtual positions from the output: the hook of an encoder-decoder."""
    (slot,) = getattr(model, _PROMPT)
    if not slot.keys or isinstance(output, tuple):
        return output
    states = output.get("encoder_last_hidden_state")
    if states is None:
        return output
    tokens = states.shape[1] - slot(len(states)).length
    return _strip(output, _ENCODER_SEQUENCES, tokens, slot.take(_PLACES))


def _strip(output: Any, names: tuple[str, ...], tokens: int, places: Tensor | None) -> Any:
    """Keep the caller's positions in the named outputs; shorter ones stay as they are."""

    def strip(states: Tensor) -> Tensor:
        if places is not None and states.shape[1] > tokens:
            return gathered(states, places)
        return states[:, -tokens:]

    if isinstance(output, tuple):
        return (strip(output[0]), *output[1:])
    for name in names:
        value = output.get(name)
        if isinstance(value, tuple):
            output[name] = tuple(map(strip, value))
        elif value is not None:
            output[name] = strip(value)
    return output


def forget_prompt(model: PreTrainedModel) -> None:
    """Remove the references to prompt slots from all modules."""
    for module in model.modules():
        if _PROMPT in module.__dict__:
            delattr(module, _PROMPT)

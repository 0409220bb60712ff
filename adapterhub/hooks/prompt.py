"""Virtual tokens enter a stack as embeddings in front of the caller's tokens.

A pre-hook on the stack replaces `input_ids` by embeddings, puts the prompt in front and widens the
mask, the positions and the token types; a hook on the output removes the virtual positions, so that
outputs have the length of the caller's input. Where a decoder attends to the stack, the virtual
positions are kept for it, as in Lester et al. 2021, and its mask is widened instead. With a KV
cache the prompt enters once, with the first tokens. In a batch padded on the left it is put in
front of the padding, which counts towards a sliding attention window.

Where rows of a batch have prompts of different lengths, shorter ones are padded on the left, and
the mask hides the padding. An encoder may take positions from the order of its input alone, so each
row is rotated until its prompt comes first and the padding last.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.anatomy.positions import position_module
from adapterhub.anatomy.sites import CHILD, Anatomy, Site
from adapterhub.errors import SiteError
from adapterhub.hooks.slot import Slot
from adapterhub.methods._site_module import EmbeddingModule

_PROMPT = "_adapterhub_prompt"
_ADDED = "added"
_SEQUENCES = ("last_hidden_state", "hidden_states")
_ENCODER_SEQUENCES = ("encoder_last_hidden_state", "encoder_hidden_states")


class AddedTokens(NamedTuple):
    """What the output of a stack needs to lose its virtual positions."""

    tokens: int  # of the caller
    rotation: Tensor | None  # (batch, 1), places by which each row was rotated


class VirtualTokenBatch(NamedTuple):
    """The virtual tokens of a batch."""

    tokens: Tensor  # (batch or 1, length, d)
    padding: Tensor | None  # (batch, 1), padding tokens on the left of each row; None: in no row

    @property
    def length(self) -> int:
        """Tokens of a row, with padding."""
        return self.tokens.shape[1]

    def widen(self, mask: Tensor) -> Tensor:
        """Extend a mask over the caller's tokens to the virtual tokens."""
        if self.padding is None:
            return F.pad(mask, (self.length, 0), value=1)
        visible = torch.arange(self.length, device=mask.device) >= self.padding
        return torch.cat([visible.to(mask.dtype), mask], dim=1)


def pad_left(
    prompts: Sequence[Tensor], sizes: Sequence[int]
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Pad the prompts of groups of rows to one length.

    Args:
        prompts: (length, d) of each group.
        sizes: rows of each group.

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


class PromptSlot(Slot):
    """Collects the virtual tokens, or the positions to skip, of the active modules of a stack.

    Args:
        names: the parameters of the stack's `forward`, in order.
        padding_idx: the padding id from which the stack counts positions, or None.
        strips: whether the output loses the virtual positions.
        rotates: whether rows with shorter prompts are rotated (see the module's docstring).
        counts: whether the stack takes positions by number.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        padding_idx: int | None,
        strips: bool,
        rotates: bool,
        counts: bool,
    ) -> None:
        super().__init__()
        self.names = names
        self.padding_idx = padding_idx
        self.strips = strips
        self.rotates = rotates
        self.counts = counts

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
            return VirtualTokenBatch(prompt[None], None)
        copies = plan.copies(batch, self.where())
        parts = [[self.placed(key)() for key in group] for group in plan.groups]
        empty = next(part for part in parts if part)[0][:0]
        prompts = [torch.cat([empty, *part]) for part in parts]
        padded, counts = pad_left(prompts, [size * copies for size in plan.sizes])
        padding = None if counts is None else plan.join(counts, copies)
        return VirtualTokenBatch(plan.join(padded, copies), padding)

    def skipped(self) -> int:
        """Return the number of positions left free in front of the tokens."""
        return sum(self.placed(key).skipped_positions for key in self.keys)


def prompt_slot(anatomy: Anatomy, site: Site) -> PromptSlot:
    """Return the slot at a stack; create it with its hooks if this is the first prompt."""
    model = anatomy.model
    root = model.get_submodule(site.host)
    slot = root._modules.get(CHILD)
    if isinstance(slot, PromptSlot):
        return slot
    names = tuple(inspect.signature(root.forward).parameters)
    feeds_decoder = site.stack == "encoder" and "decoder" in anatomy.stacks
    padding_idx = root.config.pad_token_id if anatomy.family.positions_from_padding else None  # type: ignore[union-attr]
    slot = PromptSlot(
        names,
        padding_idx,  # type: ignore[arg-type]
        strips=not feeds_decoder,
        # BERT with is_decoder=True is an encoder by its row, and attends as a decoder.
        rotates=site.stack == "encoder" and not getattr(root.config, "is_decoder", False),
        counts=not anatomy.family.positions_follow_mask,
    )
    slot.handles.append(root.register_forward_pre_hook(add_prompt, with_kwargs=True))
    slot.handles.append(root.register_forward_hook(strip_prompt))
    if feeds_decoder:
        decoder = model.get_submodule(anatomy.path(anatomy.stacks["decoder"].root))
        slot.handles.append(_pre_hook(decoder, slot, widen_encoder_mask))
        slot.handles.append(_output_hook(model, slot, strip_encoder_output))
    if body := anatomy.stacks[site.stack].body:
        slot.handles.append(_output_hook(root.get_submodule(body), slot, strip_body))
    if (taker := position_module(root)) is not None and taker is not root:
        slot.handles.append(_pre_hook(taker, slot, skip_positions))
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


def _pre_hook(module: nn.Module, slot: PromptSlot, hook: Any) -> Any:
    setattr(module, _PROMPT, [slot])
    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _output_hook(module: nn.Module, slot: PromptSlot, hook: Any) -> Any:
    setattr(module, _PROMPT, [slot])
    return module.register_forward_hook(hook)


def _past_length(cache: Any) -> int:
    return 0 if cache is None else int(cache.get_seq_length())


def add_prompt(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put the prompt in front and widen mask, positions and token types: a stack's pre-hook."""
    slot = root._modules[CHILD]
    if not isinstance(slot, PromptSlot):
        return None
    slot.take(_ADDED)
    if not slot.keys:
        return None
    inputs = dict(zip(slot.names[: len(args)], args, strict=True)) | kwargs
    ids = inputs.get("input_ids")
    source = inputs["inputs_embeds"] if ids is None else ids
    virtual = slot(len(source))
    past = _past_length(inputs.get("past_key_values"))
    before = past - virtual.length if past else 0  # the caller's tokens in the cache
    if inputs.get("attention_mask") is None and virtual.padding is not None:
        inputs["attention_mask"] = source.new_ones(
            len(source), before + source.shape[1], dtype=torch.long
        )
    skipped = slot.skipped() if "position_ids" in slot.names else 0
    if skipped and inputs.get("position_ids") is None:
        inputs["position_ids"] = _counted(inputs, slot, before).expand(len(source), -1)
    if inputs.get("attention_mask") is not None:
        inputs["attention_mask"] = virtual.widen(inputs["attention_mask"])
    _shift_positions(inputs, slot, virtual, before, skipped, adds=not past)
    if not past:
        slot.keep(_ADDED, AddedTokens(source.shape[1], virtual.padding if slot.rotates else None))
        _put_in_front(root, inputs, virtual)
        _rotate_inputs(inputs, slot, virtual)
    return (), inputs


def _put_in_front(root: nn.Module, inputs: dict[str, Any], virtual: VirtualTokenBatch) -> None:
    tokens = inputs.pop("input_ids", None)
    embeds = inputs.get("inputs_embeds")
    if embeds is None:
        embeds = root.get_input_embeddings()(tokens)  # type: ignore[operator]
    prompt = virtual.tokens.to(embeds.dtype).expand(len(embeds), -1, -1)
    inputs["inputs_embeds"] = torch.cat([prompt, embeds], dim=1)
    if inputs.get("token_type_ids") is not None:
        inputs["token_type_ids"] = F.pad(inputs["token_type_ids"], (prompt.shape[1], 0))


def _shift_positions(
    inputs: dict[str, Any],
    slot: PromptSlot,
    virtual: VirtualTokenBatch,
    before: int,
    skipped: int,
    adds: bool,
) -> None:
    positions = inputs.get("position_ids")
    first = 0 if slot.padding_idx is None else slot.padding_idx + 1
    if positions is None and slot.padding_idx is not None and inputs.get("input_ids") is not None:
        positions = _counted(inputs, slot, before)
    if positions is None and virtual.padding is not None and slot.counts and not slot.rotates:
        positions = _counted(inputs, slot, before)
    if positions is None:
        return
    padding = 0 if virtual.padding is None else virtual.padding.to(positions.device)
    behind = positions + virtual.length + skipped - padding
    shifted = torch.where(positions < first, positions, behind)
    if adds:
        numbers = torch.arange(virtual.length, device=positions.device) - padding
        numbers = first + skipped + numbers.clamp_min(0)
        shifted = torch.cat([numbers.expand(len(shifted), -1), shifted], dim=1)
    inputs["position_ids"] = shifted


def _counted(inputs: dict[str, Any], slot: PromptSlot, before: int) -> Tensor:
    """Count the positions of the caller's tokens as the backbone does: (batch or 1, tokens)."""
    if "position_ids" not in slot.names:
        raise SiteError(
            f"{slot.where()} takes no positions: prompts in one batch need equal lengths",
            hint="use prompts of one length, or one batch for each length",
        )
    ids: Tensor | None = inputs.get("input_ids")
    mask: Tensor | None = inputs.get("attention_mask")
    source: Tensor = inputs["inputs_embeds"] if ids is None else ids
    if slot.padding_idx is not None and ids is not None:
        real = ids.ne(slot.padding_idx).long()
        return real.cumsum(1) * real + slot.padding_idx
    if not slot.counts and mask is not None:
        visible = mask.long()
        return (visible.cumsum(1) * visible - 1)[:, -source.shape[1] :]
    first = before if slot.padding_idx is None else before + slot.padding_idx + 1
    return torch.arange(first, first + source.shape[1], device=source.device)[None]


def _rotate_inputs(inputs: dict[str, Any], slot: PromptSlot, virtual: VirtualTokenBatch) -> None:
    if not slot.rotates or virtual.padding is None:
        return
    for name in ("inputs_embeds", "attention_mask", "position_ids", "token_type_ids"):
        if inputs.get(name) is not None:
            inputs[name] = _rotated(inputs[name], virtual.padding)


def _rotated(rows: Tensor, by: Tensor) -> Tensor:
    """Rotate each row to the left: rows (batch, tokens, ...), by (batch, 1) places."""
    tokens = rows.shape[1]
    places = (torch.arange(tokens, device=rows.device) + by.to(rows.device)) % tokens
    places = places.view(*places.shape, *(1,) * (rows.ndim - 2))
    return rows.gather(1, places.expand(rows.shape))


def strip_prompt(root: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Remove the virtual positions: the hook of a stack."""
    slot = root._modules[CHILD]
    assert isinstance(slot, PromptSlot)
    added: AddedTokens | None = slot.take(_ADDED)
    if added is None or not slot.strips:
        return output
    return _strip(output, _SEQUENCES, *added)


def strip_body(body: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Remove the virtual positions in front of a pooler: it reads the caller's first token."""
    (slot,) = getattr(body, _PROMPT)
    added: AddedTokens | None = slot.kept(_ADDED)
    if added is None or not slot.strips:
        return output
    return _strip(output, _SEQUENCES, *added)


def widen_encoder_mask(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Extend the mask over the encoder to its virtual tokens: the pre-hook of a decoder."""
    (slot,) = getattr(decoder, _PROMPT)
    states, mask = kwargs.get("encoder_hidden_states"), kwargs.get("encoder_attention_mask")
    if not slot.keys or states is None:
        return args, kwargs
    virtual = slot(len(states))
    if mask is None and virtual.padding is not None:
        mask = states.new_ones(len(states), states.shape[1] - virtual.length, dtype=torch.long)
    if mask is not None and mask.shape[1] < states.shape[1]:
        mask = virtual.widen(mask)
        kwargs["encoder_attention_mask"] = (
            mask if virtual.padding is None else _rotated(mask, virtual.padding)
        )
    return args, kwargs


def strip_encoder_output(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Remove the encoder's virtual positions from the output: the hook of an encoder-decoder."""
    (slot,) = getattr(model, _PROMPT)
    if not slot.keys or isinstance(output, tuple):
        return output
    states = output.get("encoder_last_hidden_state")
    if states is None:
        return output
    virtual = slot(len(states))
    tokens = states.shape[1] - virtual.length
    return _strip(output, _ENCODER_SEQUENCES, tokens, virtual.padding)


def _strip(output: Any, names: tuple[str, ...], tokens: int, rotation: Tensor | None) -> Any:
    """Keep the caller's positions in the named outputs; shorter ones stay as they are."""

    def strip(states: Tensor) -> Tensor:
        if rotation is not None and states.shape[1] > tokens:
            states = _rotated(states, -rotation)
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

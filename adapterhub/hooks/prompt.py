"""Virtual tokens enter a stack as embeddings in front of the caller's tokens, and leave with its
output.

A pre-hook on the stack turns `input_ids` into embeddings, puts the prompt in front and widens the
mask, the positions and the token types; a hook on its output takes the virtual positions off again,
so that the caller sees outputs of the length that it sent. Where a decoder attends to the stack,
they stay for it, as in Lester et al. 2021, and its mask is widened instead. With a KV cache the
prompt enters once, with the first tokens. In a batch padded on the left it stands in front of the
padding, which a sliding attention window counts.

Where rows of one batch have prompts of different lengths, shorter ones are padded on the left, and
the mask hides the padding. An encoder may know positions by the order of its input alone, so there
each row is turned until its prompt comes first and the padding last.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.anatomy.positions import position_module
from adapterhub.anatomy.sites import CHILD, Anatomy, Site
from adapterhub.errors import SiteError
from adapterhub.hooks.slot import Slot

_PROMPT = "_adapterhub_prompt"
_SEQUENCES = ("last_hidden_state", "hidden_states")
_ENCODER_SEQUENCES = ("encoder_last_hidden_state", "encoder_hidden_states")


class Virtual(NamedTuple):
    """The virtual tokens of a batch: (batch or 1, length, d), and how many of them are padding in
    each row, from the left: (batch, 1); None: in no row."""

    tokens: Tensor
    padding: Tensor | None

    @property
    def length(self) -> int:
        """In tokens, padding included."""
        return self.tokens.shape[1]

    def widen(self, mask: Tensor) -> Tensor:
        """A mask over the caller's tokens as one over these and the caller's."""
        if self.padding is None:
            return F.pad(mask, (self.length, 0), value=1)
        shown = torch.arange(self.length, device=mask.device) >= self.padding
        return torch.cat([shown.to(mask.dtype), mask], dim=1)


class PromptSlot(Slot):
    """Sits at a stack: each active module gives virtual tokens, or positions to skip (`skips`).

    `turns` says that rows with shorter prompts are turned (see the module's first page), `counts`
    that the stack takes positions by their numbers.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        padding_idx: int | None,
        strips: bool,
        turns: bool,
        counts: bool,
    ) -> None:
        super().__init__()
        self.names = names
        self.padding_idx = padding_idx
        self.strips = strips
        self.turns = turns
        self.counts = counts
        self.tokens = 0
        self.added = 0
        self.turned: Tensor | None = None

    def forward(self, rows: int) -> Virtual:
        """The virtual tokens of all active prompts, for a batch of so many rows."""
        nodes = self.plan.nodes if self.plan is not None else (self.active,)
        if len(nodes) == 1:
            return Virtual(torch.cat([self.placed(key)() for key in nodes[0]])[None], None)
        assert self.plan is not None
        copies = self.plan.copies(rows, self.where())
        prompts = [[self.placed(key)() for key in node] for node in nodes]
        none = next(p for p in prompts if p)[0][:0]
        joined = [torch.cat([none, *p]) for p in prompts]
        length = max(map(len, joined))
        lacking = [length - len(p) for p in joined]
        sizes = [size * copies for size in self.plan.sizes]
        padded = [F.pad(p, (0, 0, n, 0)) for p, n in zip(joined, lacking, strict=True)]
        each = [p.expand(size, -1, -1) for p, size in zip(padded, sizes, strict=True)]
        tokens = self.plan.join(each, copies)
        if not any(lacking):
            return Virtual(tokens, None)
        counts = [
            torch.full((size, 1), n, device=tokens.device)
            for n, size in zip(lacking, sizes, strict=True)
        ]
        return Virtual(tokens, self.plan.join(counts, copies))

    def skipped(self) -> int:
        """The positions that nobody takes, in front of the tokens."""
        return sum(getattr(self.placed(key), "skips", 0) for key in self.active)


def prompt_slot(anatomy: Anatomy, site: Site) -> PromptSlot:
    """The slot at a stack, made with its hooks if this is its first prompt."""
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
        turns=site.stack == "encoder",
        counts=not anatomy.family.positions_follow_mask,
    )
    slot.handles.append(root.register_forward_pre_hook(add_prompt, with_kwargs=True))
    slot.handles.append(root.register_forward_hook(strip_prompt))
    if feeds_decoder:
        decoder = model.get_submodule(anatomy.path(anatomy.stacks["decoder"].root))
        slot.handles.append(_watch(decoder, slot, widen_encoder_mask))
        slot.handles.append(_watch_output(model, slot, strip_encoder_output))
    if body := anatomy.stacks[site.stack].body:
        slot.handles.append(_watch_output(root.get_submodule(body), slot, strip_body))
    if (module := position_module(root)) is not None and module is not root:
        slot.handles.append(_watch(module, slot, skip_positions))
    root.add_module(CHILD, slot)
    return slot


def skip_positions(table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The pre-hook of a table of positions: those that nobody takes are skipped."""
    (slot,) = getattr(table, _PROMPT)
    skipped = slot.skipped()
    if not skipped:
        return args, kwargs
    if kwargs.get("position_ids") is not None:
        return args, kwargs | {"position_ids": kwargs["position_ids"] + skipped}
    return args[:1], kwargs | {"past_key_values_length": skipped + sum(args[1:2])}


def _watch(module: nn.Module, slot: PromptSlot, hook: Any) -> Any:
    setattr(module, _PROMPT, [slot])
    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _watch_output(module: nn.Module, slot: PromptSlot, hook: Any) -> Any:
    setattr(module, _PROMPT, [slot])
    return module.register_forward_hook(hook)


def _past_length(cache: Any) -> int:
    return 0 if cache is None else int(cache.get_seq_length())


def add_prompt(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The pre-hook of a stack: prompt in front, mask, positions and token types widened."""
    slot = root._modules[CHILD]
    if not isinstance(slot, PromptSlot):
        return None
    slot.added, slot.turned = 0, None
    if not slot.active:
        return None
    inputs = dict(zip(slot.names[: len(args)], args, strict=True)) | kwargs
    ids = inputs.get("input_ids")
    source = inputs["inputs_embeds"] if ids is None else ids
    virtual = slot(len(source))
    past = _past_length(inputs.get("past_key_values"))
    slot.added = 0 if past else virtual.length
    before = past - virtual.length if past else 0  # the caller's tokens in the cache
    if inputs.get("attention_mask") is None and virtual.padding is not None:
        inputs["attention_mask"] = source.new_ones(
            len(source), before + source.shape[1], dtype=torch.long
        )
    if inputs.get("attention_mask") is not None:
        inputs["attention_mask"] = virtual.widen(inputs["attention_mask"])
    skipped = slot.skipped() if "position_ids" in slot.names else 0
    if skipped and inputs.get("position_ids") is None:
        inputs["position_ids"] = _counted(inputs, slot, before).expand(len(source), -1)
    _shift_positions(inputs, slot, virtual, before, skipped)
    if slot.added:
        _put_in_front(root, inputs, slot, virtual)
        _turn_inputs(inputs, slot, virtual)
    return (), inputs


def _put_in_front(
    root: nn.Module, inputs: dict[str, Any], slot: PromptSlot, virtual: Virtual
) -> None:
    tokens = inputs.pop("input_ids", None)
    embeds = inputs.get("inputs_embeds")
    if embeds is None:
        embeds = root.get_input_embeddings()(tokens)  # type: ignore[operator]
    prompt = virtual.tokens.to(embeds.dtype).expand(len(embeds), -1, -1)
    slot.tokens = embeds.shape[1]
    inputs["inputs_embeds"] = torch.cat([prompt, embeds], dim=1)
    if inputs.get("token_type_ids") is not None:
        inputs["token_type_ids"] = F.pad(inputs["token_type_ids"], (prompt.shape[1], 0))


def _shift_positions(
    inputs: dict[str, Any], slot: PromptSlot, virtual: Virtual, before: int, skipped: int
) -> None:
    positions = inputs.get("position_ids")
    first = 0
    if slot.padding_idx is not None:
        first = slot.padding_idx + 1
        if positions is None and inputs.get("input_ids") is not None:
            real = inputs["input_ids"].ne(slot.padding_idx).long()
            positions = real.cumsum(1) * real + slot.padding_idx
    if positions is None and virtual.padding is not None and slot.counts and not slot.turns:
        positions = _counted(inputs, slot, before)
    if positions is None:
        return
    lacking = 0 if virtual.padding is None else virtual.padding.to(positions.device)
    behind = positions + virtual.length + skipped - lacking
    shifted = torch.where(positions < first, positions, behind)
    if slot.added:
        numbers = torch.arange(virtual.length, device=positions.device) - lacking
        numbers = first + skipped + numbers.clamp_min(0)
        shifted = torch.cat([numbers.expand(len(shifted), -1), shifted], dim=1)
    inputs["position_ids"] = shifted


def _counted(inputs: dict[str, Any], slot: PromptSlot, before: int) -> Tensor:
    """The positions of the caller's tokens, as a decoder counts them for itself."""
    if "position_ids" not in slot.names:
        raise SiteError(
            f"prompts of different lengths cannot be in one batch at {slot.where()}: it takes no "
            "positions",
            hint="prompts of one length, or batches of their own",
        )
    source = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
    return torch.arange(before, before + source.shape[1], device=source.device)[None]


def _turn_inputs(inputs: dict[str, Any], slot: PromptSlot, virtual: Virtual) -> None:
    if not slot.turns or virtual.padding is None:
        return
    slot.turned = virtual.padding
    for name in ("inputs_embeds", "attention_mask", "position_ids", "token_type_ids"):
        if inputs.get(name) is not None:
            inputs[name] = _turned(inputs[name], virtual.padding)


def _turned(rows: Tensor, by: Tensor) -> Tensor:
    """rows: (batch, tokens, ...), each turned to the left by its number of places: (batch, 1)."""
    tokens = rows.shape[1]
    places = (torch.arange(tokens, device=rows.device) + by.to(rows.device)) % tokens
    places = places.view(*places.shape, *(1,) * (rows.ndim - 2))
    return rows.gather(1, places.expand(rows.shape))


def strip_prompt(root: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """The hook of a stack: the virtual positions leave its output."""
    slot = root._modules[CHILD]
    assert isinstance(slot, PromptSlot)
    added, slot.added = slot.added, 0
    if not added or not slot.strips:
        return output
    return _strip(output, _SEQUENCES, slot.tokens, slot.turned)


def strip_body(body: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """The hook of what a root pools: the pooler reads the caller's first token, not a virtual
    one."""
    (slot,) = getattr(body, _PROMPT)
    if not slot.added or not slot.strips:
        return output
    return _strip(output, _SEQUENCES, slot.tokens, slot.turned)


def widen_encoder_mask(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The pre-hook of a decoder: its mask over the encoder covers the virtual tokens there."""
    (slot,) = getattr(decoder, _PROMPT)
    states, mask = kwargs.get("encoder_hidden_states"), kwargs.get("encoder_attention_mask")
    if not slot.active or states is None:
        return args, kwargs
    virtual = slot(len(states))
    if mask is None and virtual.padding is not None:
        mask = states.new_ones(len(states), states.shape[1] - virtual.length, dtype=torch.long)
    if mask is not None and mask.shape[1] < states.shape[1]:
        mask = virtual.widen(mask)
        kwargs["encoder_attention_mask"] = (
            mask if virtual.padding is None else _turned(mask, virtual.padding)
        )
    return args, kwargs


def strip_encoder_output(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """The hook of an encoder-decoder: the encoder's virtual positions leave the final output."""
    (slot,) = getattr(model, _PROMPT)
    if not slot.active or isinstance(output, tuple):
        return output
    states = output.get("encoder_last_hidden_state")
    if states is None:
        return output
    virtual = slot(len(states))
    tokens = states.shape[1] - virtual.length
    return _strip(output, _ENCODER_SEQUENCES, tokens, virtual.padding)


def _strip(output: Any, names: tuple[str, ...], tokens: int, turned: Tensor | None) -> Any:
    """Keep the caller's `tokens` positions; what is that short already stays as it is."""

    def own(states: Tensor) -> Tensor:
        if turned is not None and states.shape[1] > tokens:
            states = _turned(states, -turned)
        return states[:, -tokens:]

    if isinstance(output, tuple):
        return (own(output[0]), *output[1:])
    for name in names:
        value = output.get(name)
        if isinstance(value, tuple):
            output[name] = tuple(own(v) for v in value)
        elif value is not None:
            output[name] = own(value)
    return output


def forget_prompt(model: PreTrainedModel) -> None:
    """Remove what prompt slots left on the modules that they watched."""
    for module in model.modules():
        if _PROMPT in module.__dict__:
            delattr(module, _PROMPT)

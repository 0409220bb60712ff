"""Virtual tokens: embeddings inserted in front of the caller's tokens of a stack.

A pre-hook on the stack replaces `input_ids` by embeddings, puts the prompt in front and widens the
mask, the positions and the token types; a hook on the output removes the virtual positions, so that
outputs have the length of the caller's input. Where a decoder attends to the stack, the virtual
positions are kept for it, as in Lester et al. 2021, and its mask is widened instead. With a KV
cache the prompt enters once, with the first tokens. `prompt_checks.py` defines the inputs that are
refused.

A larger model around the stack, such as an image-text model, may count positions and make masks
before it calls the stack. It counts from inputs, which lack the virtual tokens, and from the cache,
which includes them. So with the first tokens, the caller's mask is kept for the stack, which needs
it to find padding. With later tokens, mask and positions are extended in front of the larger model,
so that values computed from them and from the cache are as long as the cache.

A prompt is next to its text. In a row with padding on the left it follows the padding, so that the
row has the same result without padding. A prompt that counts padding as text (`counts_padding`, as
in peft) precedes the padding.

Where rows of a batch have prompts of different lengths, shorter ones are padded on the left, and
the mask hides the padding. An encoder may take positions only from the order of its input, so there
this padding moves to the end of the row.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.backbone import CHILD, padding_table, position_module
from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.errors import SiteError
from adapterhub.hooks.prompt_checks import (
    CachedPrompt,
    cached_prompt,
    check_cached_padding,
    check_cached_positions,
    check_cached_prompt,
    check_cached_states,
    check_other_inputs,
    check_packed_rows,
    check_prompt_mask,
    check_static_room,
    remember_prompt,
)
from adapterhub.hooks.slot import Mark, Slot, put_slot
from adapterhub.hooks.token_positions import move_places
from adapterhub.methods.common.site_module import EmbeddingModule

_AROUND = "_adapterhub_prompt_inside"
_TEXT = {"input_ids", "attention_mask", "position_ids", "past_key_values"}
_PLACES = "places"
_WINDOWS = ("sliding_window", "window_size")
_SEQUENCES = ("last_hidden_state", "hidden_states")
_ENCODER_SEQUENCES = ("encoder_last_hidden_state", "encoder_hidden_states")
SLIDING = "sliding_attention"
_KINDS = ("full_attention", SLIDING)  # layers with supported masks, by transformers' names


def prompt_slot(anatomy: Anatomy, site: Site) -> PromptSlot:
    """Return the slot at a stack; create it with its hooks if this is the first prompt."""
    model = anatomy.model
    root = model.get_submodule(site.host)
    slot = root._modules.get(CHILD)
    if isinstance(slot, PromptSlot):
        return slot
    names = tuple(inspect.signature(root.forward).parameters)
    feeds_decoder = site.stack == "encoder" and "decoder" in anatomy.stacks
    config: Any = getattr(root, "config", anatomy.backbone.config)
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
    slot.hook(root.register_forward_pre_hook, add_prompt, with_kwargs=True)
    # Before other hooks: a pooling reads only the caller's tokens.
    slot.hook(root.register_forward_hook, strip_prompt, prepend=True, with_kwargs=True)
    if pooled:
        _before(model, slot, hide_ids)
    if feeds_decoder:
        decoder = model.get_submodule(anatomy.path(anatomy.stacks["decoder"].root))
        _before(decoder, slot, widen_encoder_mask)
        _after(model, slot, strip_encoder_output)
    if body := anatomy.stacks[site.stack].body:
        _after(root.get_submodule(body), slot, strip_body)
    if (taker := position_module(root)) is not None and taker is not root:
        _before(taker, slot, skip_positions)
    slot.window = next((w for n in _WINDOWS if (w := getattr(config, n, None))), None)
    if table is not None:
        slot.table_padding = table.padding_idx  # type: ignore[assignment]
        _before(table, slot, show_padding)
    watch_around(anatomy, site.host, slot)
    put_slot(root, slot)
    return slot


def skip_positions(table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Leave positions free: the pre-hook of a table of positions."""
    slot = getattr(table, _mark(skip_positions))
    skipped = slot.skipped()
    if not skipped:
        return args, kwargs
    if kwargs.get("position_ids") is not None:
        return args, kwargs | {"position_ids": kwargs["position_ids"] + skipped}
    return args[:1], kwargs | {"past_key_values_length": skipped + sum(args[1:2])}


def show_padding(table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pass ids that show the padding: the pre-hook of a table that counts from padding."""
    slot = getattr(table, _mark(show_padding))
    added: AddedPrompt | None = slot.kept(ADDED)
    if added is None or added.ids is None:
        return args, kwargs
    names = ("input_ids", "inputs_embeds", "past_key_values_length")
    kwargs = dict(zip(names, args, strict=False)) | kwargs
    return (), kwargs | {"input_ids": added.ids, "inputs_embeds": None}


def _mark(hook: Any) -> str:
    """Return the attribute of a module that links a hook to its slot."""
    return f"_adapterhub_{hook.__name__}"


def _before(module: nn.Module, slot: PromptSlot, hook: Any) -> None:
    slot.patch.override(module, _mark(hook), slot)
    slot.hook(module.register_forward_pre_hook, hook, with_kwargs=True)


def _after(module: nn.Module, slot: PromptSlot, hook: Any) -> None:
    slot.patch.override(module, _mark(hook), slot)
    slot.hook(module.register_forward_hook, hook)


def hide_ids(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pass embeddings to a model whose head finds padding by ids: the pre-hook of the model."""
    slot = getattr(model, _mark(hide_ids))
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
    slot.take(ADDED)
    values = dict(zip(slot.names[: len(args)], args, strict=True)) | kwargs
    if not slot.keys:
        cache = values.get("past_key_values")
        check_cached_prompt(cache, past_length(cache), CachedPrompt())
        check_cached_states(values.get("cache_params"), CachedPrompt())
        return None
    outer: OuterInputs | None = slot.kept(OUTER)
    if (outer and outer.extended) or _continues_states(slot, values):
        return (), values
    if (added := PromptedInputs(values, slot, outer).extend(root)) is not None:
        slot.keep(ADDED, added)
        move_places(slot.scope, slot.stack(), added.length, added.places)
    return (), values


def _continues_states(slot: PromptSlot, values: dict[str, Any]) -> bool:
    """Return whether tokens follow states computed behind the active prompts."""
    if (states := values.get("cache_params")) is None:
        return False
    ids = values.get("input_ids")
    rows = len(values["inputs_embeds"] if ids is None else ids)
    return check_cached_states(states, slot.record(slot(rows).length))


def strip_prompt(
    root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """Remove the virtual positions, and record the prompt on a new cache: the hook of a stack."""
    slot = root._modules[CHILD]
    assert isinstance(slot, PromptSlot)
    added: AddedPrompt | None = slot.take(ADDED)
    if added is None:
        return output
    values = output if isinstance(output, tuple) else tuple(output.values())
    mask = kwargs.get("attention_mask")  # a mask over pairs has the prompt in front of padding
    masked = added.tokens if isinstance(mask, Tensor) and mask.ndim == 2 else 0
    for value in values:
        remember_prompt(value, slot.record(added.length, masked, added.first))
    return _strip(output, _SEQUENCES, added.tokens, added.places) if slot.strips else output


def strip_body(body: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Remove the virtual positions in front of a pooler: it reads the caller's first token."""
    slot = getattr(body, _mark(strip_body))
    added: AddedPrompt | None = slot.kept(ADDED)
    if added is None or not slot.strips:
        return output
    return _strip(output, _SEQUENCES, added.tokens, added.places)


def widen_encoder_mask(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Extend the mask over the encoder to its virtual tokens: the pre-hook of a decoder."""
    slot = getattr(decoder, _mark(widen_encoder_mask))
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
    slot = getattr(model, _mark(strip_encoder_output))
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


def watch_around(anatomy: Anatomy, host: str, slot: PromptSlot) -> None:
    """Extend the inputs of the modules around a stack, down from the model.

    A stack that is the base model is not inside such a module.
    """
    if anatomy.backbone.is_encoder_decoder or host == anatomy.base_path:
        return
    parts = host.split(".") if host else []
    for end in range(len(parts)):
        module = anatomy.model.get_submodule(".".join(parts[:end]))
        if set(inspect.signature(module.forward).parameters) >= _TEXT:
            slot.hook(Mark, module, _AROUND, slot)
            slot.hook(module.register_forward_pre_hook, extend_around, with_kwargs=True)
            slot.hook(module.register_forward_hook, forget_around, always_call=True)


def extend_around(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Keep the caller's mask, or extend the inputs that follow a cache: a forward pre-hook."""
    names = tuple(inspect.signature(module.forward).parameters)
    values = dict(zip(names, args, strict=False)) | kwargs
    for slot in getattr(module, _AROUND, ()):
        outer: OuterInputs | None = slot.kept(OUTER)
        if slot.keys and outer is None:  # otherwise an outer module did it
            slot.keep(OUTER, _extended(slot, values))
            slot.keep(_AROUND, module)
    return (), values


def _extended(slot: PromptSlot, values: dict[str, Any]) -> OuterInputs:
    if past_length(values.get("past_key_values")):
        PromptedInputs(values, slot).extend_mask_and_positions()
        return OuterInputs(extended=True)
    mask = values.get("attention_mask")
    plain = isinstance(mask, Tensor) and mask.ndim == 2
    return OuterInputs(mask if plain else None, values.get("position_ids") is not None)


def forget_around(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Discard the values kept for a pass, even a failed one: a forward hook."""
    for slot in getattr(module, _AROUND, ()):
        if slot.kept(_AROUND) is module:
            slot.take(_AROUND)
            slot.take(OUTER)


def past_length(cache: Any) -> int:
    """Return the number of tokens in a KV cache, with virtual ones."""
    return 0 if cache is None else int(cache.get_seq_length())


@dataclass
class PromptedInputs:
    """The inputs of one call of a stack, by name, modified by `extend`.

    `before` is the number of the caller's tokens in the cache; `enters` whether the prompt enters
    with this call; `lead` the padding in front of each row's prompt, (batch, 1), or None; `start`
    the same, even where the mask is over pairs and the prompt precedes padding. `outer` has the
    inputs of a larger model around the stack, if there is one.
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

        Returns: The added prompt, if it enters with this call.

        Raises:
            SiteError: inputs that cannot be extended; the error names them.
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
        """Extend mask and positions, the only inputs to extend behind a cache.

        Raises:
            SiteError: inputs that cannot be extended; the error names them.
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
        """Count the padding in front of each row's prompt at the time when it entered."""
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
        """Extend a mask over pairs; None is a causal mask of a text within any window."""
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
        """Compute the inputs that a stack adds per layer by token id; zeros for virtual tokens."""
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
        """Assign positions to the virtual tokens and to the caller's tokens behind them."""
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
        """Return whether the stack itself would number the caller's tokens differently."""
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


ADDED = "added"  # the key under which a pass keeps its AddedPrompt
OUTER = "outer"  # and its OuterInputs


@dataclass(frozen=True)
class VirtualTokenBatch:
    """The virtual tokens of a batch."""

    tokens: Tensor  # (batch or 1, length, d)
    padding: Tensor | None  # (batch, 1), padding tokens on the left of each row; None: no padding
    skips: Tensor | bool = True  # (batch, 1), whether the prompt comes behind the text's padding

    @property
    def length(self) -> int:
        """Tokens of a row, with padding."""
        return self.tokens.shape[1]

    def lead(self, mask: Tensor | None) -> Tensor | None:
        """Count the padding of each row that comes in front of its prompt.

        mask: (batch, tokens) -> (batch, 1); None if there is no padding.
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

        `mask`: (batch, tokens); `places`: the places of all tokens.
        """
        if self.padding is None:
            return arranged(F.pad(mask, (self.length, 0), value=1), places)
        visible = torch.arange(self.length, device=mask.device) >= self.padding.to(mask.device)
        return arranged(torch.cat([visible.to(mask.dtype), mask], dim=1), places)

    def widen_pairs(self, mask: Tensor, entering: bool, window: int | None = None) -> Tensor:
        """Extend a mask over pairs of a causal stack's tokens to the virtual tokens, in front.

        `mask`: (batch or 1, heads or 1, queries, keys), bool or added to the scores. `entering`:
        the virtual tokens are queries too. `window` is the number of keys that a query attends to,
        if the mask includes a window.
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
        # Padding attends to itself, so that every query has a key.
        back = number[:, None] - number
        own = (shown[:, None] & (back >= 0) & (back < (window or torch.inf))) | (back == 0)
        queries = as_mask(F.pad(own, (0, mask.shape[-1]))[:, None], mask)
        return torch.cat([queries.expand(rows, mask.shape[1], -1, -1), widened], dim=2)


def as_mask(visible: Tensor, like: Tensor) -> Tensor:
    """Convert visibility to the form of another mask: bool, or added to the scores."""
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
    """The state of one forward pass of a stack until the virtual positions are removed."""

    length: int  # virtual tokens of a row
    tokens: int  # of the caller
    places: Tensor | None = None  # of the caller's tokens, (batch, tokens)
    ids: Tensor | None = None  # (batch, length + tokens), valid only as padding or not
    first: int = 0  # the position of the first token of the text


class OuterInputs(NamedTuple):
    """The inputs of a larger model around a stack, see the module."""

    mask: Tensor | None = None  # of the caller, (batch, tokens)
    positions: bool = False  # whether the caller passed any
    extended: bool = False  # whether mask and positions already cover the virtual tokens


class PromptSlot(Slot):
    """Virtual tokens, or positions to skip, of the active modules of a stack.

    Args:
        names: the parameters of the stack's `forward`, in order.
        padding_idx: the padding id from which the stack counts positions, or None.
        strips: whether the output loses the virtual positions.
        rotates: whether padding of shorter prompts moves to the end of a row (an encoder).
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
        """Return for each group whether its prompts follow the padding."""
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

        `length` counts the virtual tokens of a row and `tokens` the tokens with a mask when the
        prompt enters; `first` is the position of the first token of the text.
        """
        return CachedPrompt(frozenset(self._prompts()), length, tokens, first)

    def skipped(self) -> int:
        """Return the number of positions left free in front of the tokens."""
        return sum(self.placed(key).skipped_positions for key in self.keys)

    def counts_padding(self) -> bool:
        """Return whether an active prompt counts padding as text."""
        return any(self.placed(key).counts_padding for key in self.keys)

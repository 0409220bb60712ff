"""The place of each token in its text, for modules that change only some tokens.

    first n      the first n tokens of the prompt
    last n       the last n tokens of the prompt
    from ids     the tokens from the last occurrence of some ids on; without ids, from the last
                 token of the prompt on

For a generative model with labels, the prompt is the text before the first learned token. In
`generate`, it is the input; otherwise it is the whole text. Padding on either side does not belong
to a text. A row whose positions restart without a mask has several texts, as in transformers.

The call of a stack counts the places from its caller's inputs, before virtual tokens are added in
front, and keeps one mask for each set of tokens that applies. Information missing from a call with
a cache (earlier tokens, padding, the end of the prompt) is recorded on the cache itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache

from adapterhub.backbones.end_tokens import labels_of_tokens
from adapterhub.errors import SiteError
from adapterhub.hooks.composition import ModelScope, forget_traced, kept_values
from adapterhub.hooks.prompt_checks import cached_prompt
from adapterhub.methods.common.site_module import TokenSet

IGNORED = -100  # the label of a token that is not learned
_RECORD = "_adapterhub_texts"
_CALLER, _CHOSEN, _TEXTS = "caller", "chosen", "texts"
_GENERATING = "generating"
_MEMORIES = ("mems", "state")
Chosen: TypeAlias = Mapping[TokenSet, Tensor | None]


class Entrance(NamedTuple):
    """A module whose call begins a pass: the model, a stack, or both in one.

    Attributes:
        arguments: the parameters of its `forward`, in order.
        stack: the stack that begins with it, if any.
        generates: whether the model generates text with that stack.
        follows: whether that stack is a decoder behind an encoder.
    """

    arguments: tuple[str, ...]
    stack: str | None = None
    generates: bool = False
    follows: bool = False


class CachedTexts(NamedTuple):
    """The tokens in a cache, without virtual ones."""

    ids: Tensor  # (rows, tokens), -1 where they are unknown
    real: Tensor  # (rows, tokens), false at padding
    end: int  # of the prompt


@dataclass
class GenerateCall:
    """One call of `generate`.

    `ids` is its input, if it has token ids, `mask` the mask over its tokens and `tokens` their
    number. `end` is the end of the prompt, including tokens of the cache, once known.
    """

    ids: Tensor | None
    mask: Tensor | None
    tokens: int | None
    end: int | None = None

    def prompt(self, past: int, tokens: int) -> int:
        """Return the end of the prompt, known from the first call of the stack."""
        if self.end is None:  # candidates may follow, and a cache may hold earlier turns
            whole = self.tokens is not None and not past
            self.end = self.tokens if whole else max(past + tokens, self.tokens or 0)
        assert self.end is not None
        return self.end


@dataclass(frozen=True)
class Texts:
    """The texts in the rows of a batch, including tokens in a cache.

    Attributes:
        real: (rows, tokens), false at padding.
        prompt: (rows, tokens), the tokens of prompts.
        ids: (rows, tokens), or None.
        number: (rows, tokens), the number of each token's text in its row; None: one text per row.
        end: the end of the prompt, if it is the same in all rows.
        past: the number of tokens in the cache.
        searched: the last end of an occurrence of tokens: the end of the prompt in `generate`.
        before: (rows, tokens), the tokens before the first learned one; None without labels.
    """

    real: Tensor
    prompt: Tensor
    ids: Tensor | None
    number: Tensor | None
    end: int
    past: int
    searched: int | None
    before: Tensor | None = None

    def choose(self, tokens: TokenSet) -> Tensor | None:
        """Return a mask of the tokens of this call in a set: (rows, tokens, 1); None: no token."""
        if tokens.kind == "from":
            some = self._from(tokens.ids) if tokens.ids else self._from_end()
            return some[:, self.past :, None]
        if self.past >= self.end:
            return None
        place = self._counted(self.prompt)
        if tokens.kind == "last":
            place = self._prompt_size() + 1 - place
        return (self.prompt & (place <= tokens.size))[:, self.past :, None]

    def _from_end(self) -> Tensor:
        """Return the last token of each prompt and later ones; all tokens without a prompt."""
        if self.before is not None:
            return self.real & (self._counted(self.before) == self._total(self.before))
        return self.real & (self._counted(self.prompt) == self._prompt_size())

    def _prompt_size(self) -> Tensor:
        """Count the tokens of each prompt, including tokens of later calls (chunks)."""
        return self._total(self.prompt) + max(0, self.end - self.prompt.shape[1])

    def _from(self, ids: tuple[int, ...]) -> Tensor:
        """Return the tokens from the last occurrence of `ids` in their text on."""
        own, size = self.ids, len(ids)
        if own is None:
            raise SiteError(
                "the tokens that invoke an adapter are looked for in token ids, of which there are "
                "none",
                expected="input_ids",
                hint="input_ids instead of inputs_embeds",
            )
        last = own.shape[1] - size + 1
        if last < 1:
            return torch.zeros_like(self.real)
        begins = self.real[:, :last]
        for number, token in enumerate(ids):
            begins = begins & (own[:, number : last + number] == token)
        if self.number is not None:  # inside one text
            begins = begins & (self.number[:, :last] == self.number[:, size - 1 :])
        if self.searched is not None:
            begins = begins & (torch.arange(last, device=own.device) <= self.searched - size)
        begins = F.pad(begins, (0, size - 1))
        count = self._counted(begins)
        return self.real & (count > 0) & (count == self._total(begins))

    def _counted(self, marks: Tensor) -> Tensor:
        """Count the marks of each text up to each token."""
        total = marks.cumsum(1)
        if self.number is None:
            return total
        first = F.pad(self.number.diff(dim=1) != 0, (1, 0), value=True)
        return total - self._total(first * (total - marks.long()))

    def _total(self, marks: Tensor) -> Tensor:
        """Sum the marks of each token's text."""
        if self.number is None:
            return marks.sum(1, keepdim=True)
        sums = torch.zeros_like(self.number).scatter_add(1, self.number, marks.long())
        return sums.gather(1, self.number)


def keep_inputs(
    scope: ModelScope,
    entrance: Entrance,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sets: Iterable[tuple[str, TokenSet]],
) -> None:
    """Keep the arguments of a module, and the chosen tokens if it is a stack."""
    values = dict(zip(entrance.arguments, args, strict=False)) | kwargs
    kept = kept_values(scope)
    if entrance.stack is None:
        kept[_CALLER] = values
        return
    own = [tokens for stack, tokens in sets if stack == entrance.stack]
    call = _Call(values, kept, entrance)
    find = _find
    if own and torch.compiler.is_compiling() and call.waits():
        find = torch.compiler.disable(_find_apart)  # type: ignore[no-untyped-call]
    result = find(call, own) if own else None
    if result is None:
        return
    chosen, kept[_TEXTS] = result
    # Separately compiled layers read the values kept before them.
    for each in (kept, scope.traced):
        each[_CHOSEN] = {**each.get(_CHOSEN, {}), entrance.stack: chosen}


def _find(call: _Call, own: Iterable[TokenSet]) -> tuple[Chosen, CachedTexts] | None:
    """Return the chosen tokens and the texts of a call, which are recorded on its cache."""
    texts = call.texts()
    if texts is None:
        return None
    record = CachedTexts(_known(texts), texts.real, texts.end)
    _remember(record, (call.values.get("past_key_values"),))
    return {tokens: texts.choose(tokens) for tokens in own}, record


def _find_apart(call: _Call, own: Iterable[TokenSet]) -> tuple[Chosen, CachedTexts] | None:
    """Call `_find` outside the compiled code.

    The record outlives the outputs of a CUDA graph, which the next call overwrites. The chosen
    tokens always have the strides of their shape, otherwise each call would compile again.
    """
    result = _find(call, own)
    if result is None:
        return None
    chosen, record = result
    return {s: None if mask is None else mask.contiguous() for s, mask in chosen.items()}, record


def forget_inputs(scope: ModelScope, entrance: Entrance, output: Any, whole: bool) -> None:
    """Record the texts on a new cache when a stack ends; discard inputs when the model ends."""
    kept = kept_values(scope)
    record = kept.pop(_TEXTS, None) if entrance.stack is not None else None
    if record is not None:
        values = output.values() if isinstance(output, Mapping) else output
        _remember(record, values if isinstance(output, Mapping | tuple) else ())
    if whole:
        for name in (_CALLER, _CHOSEN):
            kept.pop(name, None)
        forget_traced(scope)


def _remember(record: CachedTexts, values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, Cache):
            setattr(value, _RECORD, record)


def _known(texts: Texts) -> Tensor:
    unknown = texts.real.long() * 0 - 1
    return unknown if texts.ids is None else texts.ids


def move_places(scope: ModelScope, stack: str, length: int, places: Tensor | None) -> None:
    """Put virtual tokens, which are not in any set, in front of the caller's tokens.

    `places` are the places of the caller's tokens in the rows, (batch, tokens); None: the last.
    """
    kept = kept_values(scope)
    chosen: Chosen | None = kept.get(_CHOSEN, {}).get(stack)
    if not chosen:
        return
    moved = {}
    for tokens, mask in chosen.items():
        wide = None if mask is None else F.pad(mask, (0, 0, length, 0))
        if wide is not None and mask is not None and places is not None:
            own = places.to(mask.device)[:, :, None].expand(len(mask), -1, -1)
            wide = torch.zeros_like(wide).scatter(1, own, mask)
        moved[tokens] = wide
    for each in (kept, scope.traced):
        each[_CHOSEN] = {**each.get(_CHOSEN, {}), stack: moved}


def chosen_tokens(scope: ModelScope, stack: str, where: str) -> Chosen:
    """Return the chosen tokens of this pass.

    Raises:
        SiteError: the stack was not called with tokens.
    """
    chosen: Chosen | None = kept_values(scope).get(_CHOSEN, {}).get(stack)
    if chosen is None:
        raise SiteError(
            f"the places of tokens at {where} are unknown: its stack was not called with tokens",
            expected="a call of the model, or of its stack, with input_ids or inputs_embeds",
        )
    return chosen


def as_states(mask: Tensor | None, y: Tensor, batch_dim: int, where: str) -> Tensor | None:
    """Return a mask in the layout of states.

    mask: (batch, tokens, 1); y: (batch, tokens, d), (tokens, batch, d) or (batch x tokens, d).

    Raises:
        SiteError: the states do not match the tokens.
    """
    if mask is None:
        return None
    mask = mask.transpose(0, 1) if batch_dim else mask
    if y.ndim == 2 and len(y) == mask.numel():
        return mask.reshape(-1, 1)
    if y.ndim != 3 or y.shape[:2] != mask.shape[:2]:
        rows, tokens = mask.shape[batch_dim], mask.shape[1 - batch_dim]
        raise SiteError(
            f"{where} computes states of the form {tuple(y.shape)}, which are not those of "
            f"{rows} rows of {tokens} tokens",
            expected="a site that sees the tokens of the batch, one row each",
            hint="a method that changes all tokens there, such as lora",
        )
    return mask


@contextmanager
def generating(
    scope: ModelScope, args: tuple[Any, ...], options: Mapping[str, Any]
) -> Iterator[None]:
    """Mark the calls inside as calls of `generate` with these arguments."""
    ids = args[0] if args else options.get("inputs", options.get("input_ids"))
    embeds = options.get("inputs_embeds")
    source = ids if embeds is None else embeds
    ids = ids if isinstance(ids, Tensor) and embeds is None and ids.ndim == 2 else None
    kept = kept_values(scope)
    before = kept.get(_GENERATING)
    tokens = source.shape[1] if isinstance(source, Tensor) else None
    mask = options.get("attention_mask")
    mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
    kept[_GENERATING] = GenerateCall(ids, mask, tokens)
    try:
        yield
    finally:
        kept[_GENERATING] = before


@dataclass
class _Call:
    """One call of a stack: its arguments by name, and the values kept for the pass."""

    values: dict[str, Any]
    kept: Mapping[str, Any]
    entrance: Entrance

    @property
    def caller(self) -> Mapping[str, Any]:
        """The arguments of the model, by name; {} if the stack was called directly."""
        caller: Mapping[str, Any] = self.kept.get(_CALLER) or {}
        return caller

    def waits(self) -> bool:
        """Return whether the length of the cache is a value on the device, as in a static cache."""
        cache = self.values.get("past_key_values")
        return cache is not None and isinstance(cache.get_seq_length(), Tensor)

    def texts(self) -> Texts | None:
        """Return the texts of the rows; None without tokens."""
        ids = self.values.get("input_ids")
        source = self.values.get("inputs_embeds") if ids is None else ids
        if source is None:
            return None
        rows, tokens = source.shape[:2]
        self._refuse_memories()
        cache = self.values.get("past_key_values")
        past = 0 if cache is None else int(cache.get_seq_length())
        past -= cached_prompt(cache).length if past else 0
        record: CachedTexts | None = getattr(cache, _RECORD, None) if past else None
        if record is not None and len(record.real) != rows:
            raise SiteError(
                f"the cache holds {len(record.real)} rows, the call has {rows}",
                expected="the rows with which the cache was filled",
            )
        ids = self._ids(rows, tokens)
        number = self._numbers(rows, tokens) if not past else None
        call: GenerateCall | None = self.kept.get(_GENERATING) if self.entrance.generates else None
        if call is not None and self.entrance.follows:
            call.ids = call.mask = call.tokens = None  # of the encoder
        real = self._real(source, past, record, call)
        if call is not None:
            end = call.prompt(past, tokens)
        else:
            end = past + tokens if record is None else record.end
        prompt = real
        if call is not None or record is not None:
            prompt = real & (torch.arange(past + tokens, device=real.device) < end)
        whole = None if ids is None else self._earlier(ids, past, record, call)
        texts = Texts(real, prompt, whole, number, end, past, None if call is None else end)
        labels = None if call is not None or past else self._labels(rows, tokens)
        return texts if labels is None else _before_learned(texts, labels, self.entrance.follows)

    def _refuse_memories(self) -> None:
        """Refuse tokens that follow states of earlier ones, whose number is unknown."""
        states = self.values.get("cache_params")
        layers = states.layers if isinstance(states, Cache) else ()
        flags = (getattr(layer, "has_previous_state", None) or {} for layer in layers)
        held = [name for name in _MEMORIES if self.values.get(name) is not None]
        held += ["cache_params"] if any(any(each.values()) for each in flags) else []
        if held:
            raise SiteError(
                "tokens that follow states of earlier ones have unknown places",
                offenders=held,
                expected="a cache of keys and values, or whole texts",
                hint="use_cache=False; or a method that changes all tokens, such as lora",
            )

    def _real(
        self, source: Tensor, past: int, record: CachedTexts | None, call: GenerateCall | None
    ) -> Tensor:
        """Return a mask that is false at padding, (rows, tokens), including tokens in the cache."""
        rows, tokens = source.shape[:2]
        total = past + tokens
        own = self.values.get("attention_mask")
        masks = [own, self.caller.get("attention_mask") if self._shares_mask(own) else None]
        for mask in masks:
            if isinstance(mask, Tensor) and mask.shape == (rows, total):
                return mask != 0
        ones = torch.ones(rows, tokens, dtype=torch.bool, device=source.device)
        if record is not None:
            return torch.cat([_exactly(record.real, past, True), ones], 1)
        if own is None:
            return F.pad(ones, (past, 0), value=True)
        if call is not None and call.mask is not None and not rows % len(call.mask):
            copies = rows // len(call.mask)
            return _exactly((call.mask != 0).repeat_interleave(copies, 0), total, True)
        form = tuple(own.shape) if isinstance(own, Tensor) else type(own).__name__
        raise SiteError(
            f"an attention mask with the form {form} does not show where texts begin and end",
            expected=f"an attention_mask of ({rows}, {total})",
            hint="attention_mask=(input_ids != pad_token_id).long()",
        )

    def _shares_mask(self, own: Any) -> bool:
        """Return whether the mask of the model's caller covers the tokens of this stack."""
        others = ("decoder_input_ids", "decoder_inputs_embeds")
        if self.entrance.follows:  # the decoder of a classifier reads the text of the encoder
            written = any(self.caller.get(name) is not None for name in others)
            labels = self.caller.get("labels")
            return not (written or (isinstance(labels, Tensor) and labels.ndim > 1))
        return own is not None  # in a form that the model has computed from it

    def _ids(self, rows: int, tokens: int) -> Tensor | None:
        """Return the token ids of this call, (rows, tokens), if available in the stack or model."""
        own = self.values.get("input_ids")
        if own is None and not self.entrance.follows:
            own = self.caller.get("input_ids")
        return own if isinstance(own, Tensor) and own.shape == (rows, tokens) else None

    def _earlier(
        self, ids: Tensor, past: int, record: CachedTexts | None, call: GenerateCall | None
    ) -> Tensor:
        """Put the ids of tokens in the cache in front; unknown ones are -1."""
        if not past:
            return ids
        prompt = None if call is None else call.ids
        if record is not None:
            earlier = record.ids
        elif prompt is not None and prompt.shape[1] >= past and not len(ids) % len(prompt):
            earlier = prompt.repeat_interleave(len(ids) // len(prompt), 0)
        else:
            earlier = ids[:, :0]
        return torch.cat([_exactly(earlier.to(ids.device), past, -1), ids], 1)

    def _numbers(self, rows: int, tokens: int) -> Tensor | None:
        """Return the number of each token's text in a packed row, as in transformers."""
        positions = self.values.get("position_ids")
        if positions is None or self.values.get("attention_mask") is not None:
            return None
        if positions.ndim == 3 and len(positions) == 4:  # M-RoPE, with text positions first
            positions = positions[0]
        if positions.ndim != 2 or positions.shape[1] != tokens:
            return None
        numbers = (positions.diff(dim=1) != 1).cumsum(1)
        return F.pad(numbers, (1, 0)).expand(rows, -1)

    def _labels(self, rows: int, tokens: int) -> Tensor | None:
        """Return the labels of generated tokens, (rows, tokens), if available."""
        if not self.entrance.generates:
            return None
        labels = self.caller.get("labels")
        if labels is None and not torch.compiler.is_compiling():  # context variables are not traced
            labels = labels_of_tokens()
        return labels if isinstance(labels, Tensor) and labels.shape == (rows, tokens) else None


def _before_learned(texts: Texts, labels: Tensor, follows: bool) -> Texts:
    """End prompts before the first learned token; a text that begins with it has no prompt.

    A decoder behind an encoder receives, at each place, the token before the one learned there.
    """
    learned = (labels != IGNORED).to(texts.real.device)
    earlier = texts._counted(learned)
    before = texts.real & (earlier - learned.long() if follows else earlier).eq(0)
    prompt = before | (texts.real & texts._total(before).eq(0))
    return replace(texts, prompt=prompt, before=before)


def _exactly(rows: Tensor, tokens: int, fill: int) -> Tensor:
    """Return the first tokens of rows, padded on the right."""
    rows = rows[:, :tokens]
    return F.pad(rows, (0, tokens - rows.shape[1]), value=fill)

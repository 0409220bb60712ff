"""Checks that refuse inputs for which a prompt would condition the wrong tokens, or none.

A cache is filled with a prompt once. Its length and its prompts are recorded on the cache itself,
so that later calls recognize a cache filled without the prompt, or with another one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from adapterhub.errors import SiteError

_RECORD = "_adapterhub_prompt"
_EXTENDED = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "per_layer_inputs",
)
_MEMORIES = ("mems", "cache_params", "state")
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")


class CachedPrompt(NamedTuple):
    """The prompt in a cache."""

    keys: frozenset[str] = frozenset()  # the keys of the modules that computed it
    length: int = 0  # virtual tokens of a row
    tokens: int = 0  # tokens that had a mask when the prompt entered
    first: int = 0  # the position of the first token of the text; PaliGemma counts from 1


def cached_prompt(cache: Any) -> CachedPrompt:
    """Return the record of the prompt in a cache; empty if the cache has no prompt."""
    record = getattr(cache, _RECORD, None)
    return record if isinstance(record, CachedPrompt) else CachedPrompt()


def check_cached_states(cache: Any, active: CachedPrompt) -> bool:
    """Return whether a cache has states of earlier tokens, which were computed behind a prompt.

    Later tokens then enter unchanged: states, unlike keys, do not need a mask over earlier tokens.

    The cache holds states, as in Mamba, without keys and values.

    Raises:
        SiteError: the states were computed behind other prompts.
    """
    if not isinstance(cache, Cache):
        return False
    flags = (getattr(layer, "has_previous_state", None) or {} for layer in cache.layers)
    if not any(any(each.values()) for each in flags):
        return False
    _refuse_other_prompt(
        "the states in the cache were computed behind", cached_prompt(cache), active
    )
    return True


def remember_prompt(cache: Any, record: CachedPrompt) -> None:
    """Record the prompt that a cache was filled with."""
    if isinstance(cache, Cache):
        setattr(cache, _RECORD, record)


def check_cached_prompt(cache: Any, past: int, active: CachedPrompt) -> None:
    """Refuse a cache whose tokens were computed behind other prompts than the active ones.

    Raises:
        SiteError: the prompts differ.
    """
    if past:
        held = cached_prompt(cache)
        _refuse_other_prompt(f"the cache has {past} tokens, and among them", held, active)


def _refuse_other_prompt(what: str, held: CachedPrompt, active: CachedPrompt) -> None:
    if (held.length, held.keys) != (active.length, active.keys):
        raise SiteError(
            f"{what} {_described(held)}; active now: {_described(active)}",
            expected="the prompt with which the cache was filled",
            hint="activate that prompt, or pass the whole text with an empty cache",
        )


def _described(record: CachedPrompt) -> str:
    return f"a prompt of {record.length} virtual tokens" if record.length else "no prompt"


def check_prompt_mask(mask: Any, keys: int, past: int, pairs: bool) -> None:
    """Refuse a mask that cannot be extended to virtual tokens.

    `keys` counts the caller's tokens, including those in the cache; `past` the tokens in the cache,
    including virtual ones. `pairs`: a mask over pairs of tokens can be extended, in a causal stack,
    inside its sliding window.

    Raises:
        SiteError: a mask of another form or length.
    """
    if mask is None:
        return
    shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    is_pairs = isinstance(mask, Tensor) and mask.ndim == 4
    supported = is_pairs and pairs and (mask.dtype == torch.bool or mask.is_floating_point())
    if not supported and not (isinstance(mask, Tensor) and mask.ndim == 2):
        wide = ", or bool or float (batch, heads, queries, keys)" if pairs else ""
        raise SiteError(
            f"an attention mask with the form {shape} cannot be extended to a prompt",
            expected=f"an attention_mask of (batch, tokens){wide}",
            hint="attention_mask=(input_ids != pad_token_id).long(); in generate also "
            'cache_implementation="dynamic"',
        )
    if mask.shape[-1] != keys and (past or is_pairs):
        raise SiteError(
            f"the attention mask covers {mask.shape[-1]} tokens, the text has {keys}, without the "
            "prompt",
            expected="a mask over all tokens of the text, those in the cache too",
            hint="with a cache, pass only the tokens that are not in it; in generate also "
            'cache_implementation="dynamic"',
        )


def check_cached_padding(lead: Tensor, before: int, held: CachedPrompt) -> None:
    """Refuse padding that begins in front of a cached prompt and ends behind it.

    `lead` is the padding on the left of each row, (batch, 1); `before` counts the caller's tokens
    in the cache.

    Raises:
        SiteError: a row had only padding when its prompt entered.
    """
    # Later calls have the same result.
    if torch.compiler.is_compiling() or before != held.tokens:
        return
    if bool((lead > held.tokens).any()):
        raise SiteError(
            f"the first {held.tokens} tokens of a row are padding, and more padding follows: its "
            "prompt would not be next to its text",
            expected="at least one token of each text in the first call with a cache",
            hint="a larger prefill_chunk_size, or padding on the right",
        )


def check_cached_positions(inputs: dict[str, Any], before: int, first: int = 0) -> None:
    """Refuse tokens that do not follow those in the cache: their positions leave a gap.

    generate leaves out tokens as if virtual ones in the cache were the caller's.

    `before` counts the caller's tokens in the cache; `first` is the position of the first of them.

    Raises:
        SiteError: there is a gap.
    """
    positions = inputs.get("position_ids")
    if positions is None or inputs.get("attention_mask") is not None:
        return
    text = _text_positions(positions)
    expected = first + before
    if text is None or (not torch.compiler.is_compiling() and bool((text[:, 0] != expected).any())):
        values = positions[..., 0].flatten().tolist()
        raise SiteError(
            f"the cache holds {before} tokens of the text, the next ones have positions {values}",
            expected="the tokens behind those in the cache",
            hint="with a cache, pass only the tokens that are not in it, to generate too; for "
            "positions of your own, pass an attention_mask",
        )


def check_other_inputs(names: Collection[str], inputs: dict[str, Any], source: Tensor) -> None:
    """Refuse inputs that are not extended to virtual tokens: per-token values, or a memory.

    `names` are the parameters of the stack's `forward`; other inputs are options of attention or
    the loss. `source` has its token ids or embeddings.

    Raises:
        SiteError: such inputs are present.
    """
    rows, tokens = source.shape[:2]
    memories = [name for name in _MEMORIES if inputs.get(name) is not None]
    unknown = [name for name in memories if not isinstance(inputs[name], Cache)] + [
        name
        for name, value in inputs.items()
        if name in names and name not in _EXTENDED and not name.startswith("encoder_")
        if isinstance(value, Tensor) and value.ndim > 1
        if value.shape[0] == rows and tokens in (value.shape[1], value.shape[-1])
    ]
    if unknown:
        raise SiteError(
            "inputs that cannot be extended to a prompt",
            offenders=unknown,
            expected=f"only {', '.join(_EXTENDED)} for each token; no memory but past_key_values",
            hint="a method without virtual tokens, such as lora",
        )


def check_packed_rows(inputs: dict[str, Any], past: int) -> None:
    """Refuse rows of several texts: a prompt in front would condition the first text only.

    Raises:
        SiteError: a row has several texts.
    """
    named = [name for name in _PACKED if inputs.get(name) is not None]
    if named or (past == 0 and _positions_restart(inputs)):
        how = named[0] if named else "their position_ids start again"
        raise SiteError(
            f"rows of the batch hold several texts ({how}): a prompt conditions only the first",
            expected="one text in each row",
            hint="a batch without packing (packing=False), or, with position_ids alone, a 4-D "
            "attention_mask in which no text sees another",
        )


def _positions_restart(inputs: dict[str, Any]) -> bool:
    """Return whether transformers would treat the rows as packed, by their positions."""
    positions = inputs.get("position_ids")
    if positions is None or inputs.get("attention_mask") is not None:
        return False
    text = _text_positions(positions)
    if text is None or torch.compiler.is_compiling():
        return False
    return bool((text.diff(dim=-1) != 1).any())


def _text_positions(positions: Tensor) -> Tensor | None:
    """Return positions in the text, (batch or 1, tokens); None if only M-RoPE has positions.

    Positions of M-RoPE are (3, batch, tokens): time, height and width. The positions in the text
    may precede these.
    """
    if positions.ndim < 3:
        return positions
    return positions[0] if len(positions) == 4 else None


def check_static_room(cache: Any, tokens: int, window: int | None) -> None:
    """Refuse a static cache without room for the prompt.

    `tokens` counts all future tokens in the cache, including virtual ones. A layer with a sliding
    window needs `window`, None if there is no such layer.

    Raises:
        SiteError: it is too short.
    """
    layers = [layer for layer in getattr(cache, "layers", ()) if hasattr(layer, "max_cache_len")]
    sizes = [
        layer.max_cache_len
        for layer in layers
        if not layer.is_sliding or layer.max_cache_len < (window or tokens)
    ]
    if sizes and min(sizes) < tokens:
        raise SiteError(
            f"a static cache for {min(sizes)} tokens is too short for {tokens}, with the prompt",
            expected="a cache with room for the virtual tokens too",
            hint=f"StaticCache(config, max_cache_len={tokens}) or more, or a DynamicCache",
        )

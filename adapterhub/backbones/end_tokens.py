"""The tokens at which the generation of a model stops: `eos_token_id` of its generation config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EndTokens = int | list[int] | None
"""As a generation config has them."""
_MARK = "\ue0a1answer\ue0a2"  # of characters that no text has


def end_tokens(model: PreTrainedModel) -> EndTokens:
    """Return the tokens at which the generation of a model stops."""
    ends: EndTokens = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return ends


def set_end_tokens(model: PreTrainedModel, ends: EndTokens) -> None:
    """Let the generation of a model stop at these tokens."""
    config: Any = getattr(model, "generation_config", None)
    if config is not None:
        config.eos_token_id = ends


def with_stops(ends: EndTokens, stops: Iterable[int]) -> list[int]:
    """Return the tokens at which generation stops, and others, each once."""
    own = [ends] if isinstance(ends, int) else ends or ()
    return [*dict.fromkeys([*own, *stops])]


def text_stops(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token that a tokenizer has behind a text; none if it has no such token."""
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def ended(
    ids: list[int], tokenizer: PreTrainedTokenizerBase, limit: int | None = None
) -> list[int]:
    """Return the tokens of a text with the token that ends texts, once; `limit` includes it."""
    end = text_stops(tokenizer)
    while end and ids[-1:] == end:
        ids = ids[:-1]
    return [*ids[: None if limit is None else limit - len(end)], *end]


def template_stops(tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> list[int]:
    """Return the token that a chat template writes behind an answer, at which generation stops.

    Messages for a template that is not the tokenizer's own are lists of parts.

    Returns:
        One special or added token; none if the template writes text there, or nothing.
    """
    contents: list[Any] = ["question", _MARK]
    if template is not None:
        contents = [[{"type": "text", "text": text}] for text in contents]
    turns = [
        {"role": role, "content": content}
        for role, content in zip(("user", "assistant"), contents, strict=True)
    ]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False, chat_template=template))
    except Exception:  # a template raises anything
        return []
    behind = text[text.rfind(_MARK) + len(_MARK) :] if _MARK in text else ""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for i in tokenizer(behind, add_special_tokens=False)["input_ids"]:
        if i in special:
            return [i]
        if str(tokenizer.decode([i])).strip():
            break
    return []

"""The tokens that end a text and stop generation, and the labels of learned tokens.

An evaluation or a custom loss calls a model without labels. A context passes the labels to hooks
that change tokens by their positions, which need to find the end of prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


"""End tokens in the form of a generation config."""
_MARK = "\ue0a1answer\ue0a2"  # characters that do not occur in texts


def with_stops(ends: int | list[int] | None, stops: Iterable[int]) -> list[int]:
    """Add tokens to the ones that stop generation, without duplicates."""
    own = [ends] if isinstance(ends, int) else ends or ()
    return [*dict.fromkeys([*own, *stops])]


def text_stops(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token that a tokenizer ends a text with; empty if it lacks one."""
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def ended(
    ids: list[int], tokenizer: PreTrainedTokenizerBase, limit: int | None = None
) -> list[int]:
    """Return the tokens of a text with one end token; `limit` includes the end token."""
    end = text_stops(tokenizer)
    while end and ids[-1:] == end:
        ids = ids[:-1]
    return [*ids[: None if limit is None else limit - len(end)], *end]


def template_stops(tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> list[int]:
    """Return the token that a chat template adds after an answer; it stops generation.

    Messages for a template other than the tokenizer's are lists of parts.

    Returns:
        One special or added token; empty if the template adds text or nothing.
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
    except Exception:  # a template may raise any error
        return []
    behind = text[text.rfind(_MARK) + len(_MARK) :] if _MARK in text else ""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for i in tokenizer(behind, add_special_tokens=False)["input_ids"]:
        if i in special:
            return [i]
        if str(tokenizer.decode([i])).strip():
            break
    return []


LEARNED: ContextVar[Tensor | None] = ContextVar("learned", default=None)
"""The labels of the tokens, (batch, tokens), of the model's inputs; -100 means no label."""


def labels_of_tokens() -> Tensor | None:
    """Return the labels of the inputs that a model computes now; None if they are unknown."""
    return LEARNED.get()

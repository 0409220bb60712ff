"""The tokens that end a text, at which generation stops, and those that are learned.

The latter are told to a pass whose model gets no labels: an evaluation, or a loss of our own, calls
a model without them; what changes tokens by their places still has to know where prompts end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


"""As a generation config has them."""
_MARK = "\ue0a1answer\ue0a2"  # of characters that no text has


def with_stops(ends: int | list[int] | None, stops: Iterable[int]) -> list[int]:
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


_LABELS: ContextVar[Tensor | None] = ContextVar("learned_tokens", default=None)


@contextmanager
def learned_tokens(labels: Tensor | None) -> Iterator[None]:
    """Tell the calls inside the labels of their tokens, (batch, tokens), -100 where none is."""
    token = _LABELS.set(labels)
    try:
        yield
    finally:
        _LABELS.reset(token)


def labels_of_tokens() -> Tensor | None:
    """Return the labels that this context has told; None: nothing."""
    return _LABELS.get()

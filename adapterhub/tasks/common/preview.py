"""Rows as text: their tokens, and the learned ones among them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from adapterhub.errors import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE, NOT_LEARNED = "▁", "·"


def token_texts(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the tokens of ids, including special ones; ▁ is a space before a token."""
    return [_token_text(i, tokenizer) for i in ids]


def tokens_line(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return tokens in one line, separated by spaces."""
    return " ".join(token_texts(ids, tokenizer))


def learned_line(labels: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the tokens of labels, with · for positions that the loss ignores."""
    words: list[str] = []
    for learned, group in itertools.groupby(labels, lambda label: label >= 0):
        ids = list(group)
        ignored = NOT_LEARNED if len(ids) == 1 else f"{NOT_LEARNED}x{len(ids)}"
        words += token_texts(ids, tokenizer) if learned else [ignored]
    return " ".join(words)


def tags_line(
    ids: Sequence[int],
    tags: Sequence[int],
    names: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """Return tokens with the names of their tags, as token/TAG; ignored tokens lack a tag.

    `tags` are indices of names; negative ones are ignored.
    """
    pairs = zip(token_texts(ids, tokenizer), tags, strict=True)
    return " ".join(f"{text}/{names[tag]}" if tag >= 0 else text for text, tag in pairs)


def removed_text(
    whole: Sequence[int], kept: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> str:
    """Return the text of the tokens in `whole` but not in `kept`, in order."""
    matcher = SequenceMatcher(None, whole, kept, autojunk=False)
    gone = [whole[a:b] for kind, a, b, _, _ in matcher.get_opcodes() if kind != "equal"]
    return " ... ".join(str(tokenizer.decode(list(ids))).strip() for ids in gone if ids)


def _token_text(token_id: int, tokenizer: PreTrainedTokenizerBase) -> str:
    token = str(tokenizer.convert_ids_to_tokens(token_id))
    text = str(tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
    if token.startswith("##") or "\ufffd" in text or not text:
        return one_line(token)  # part of a word or of a character
    lead = SPACE * token.startswith(("Ġ", SPACE)) if not text.startswith(" ") else ""
    return one_line(lead + text.replace(" ", SPACE))

"""Streamed tokens as text: characters are whole, and stop texts are found before they show.

A token may end within a character, and a stop text may begin in one token and end in a later one.
Text that may still change is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from adapterhub.serving.generation.request import GeneratedToken, Piece
from adapterhub.tasks.common.language_models import (
    INCOMPLETE,
    WrittenPieces,
    cleans_up,
    written_text,
)

_BEFORE = 5  # prompt tokens decoded with the first ones: a space may depend on them


@dataclass
class TextPieces:
    """The text of the tokens so far.

    Attributes:
        tokenizer: decodes tokens; used by one thread.
        ids: the last tokens of the prompt, then the tokens of the text.
        stop: texts that end it.
        stopped: whether a stop text was found.
        text: the text returned so far.
    """

    tokenizer: Any
    ids: list[int]
    stop: Sequence[str] = ()
    stopped: bool = False
    text: str = ""
    tokens: list[GeneratedToken] = field(default_factory=list)
    _held: str = ""
    _waiting: list[tuple[int, GeneratedToken]] = field(default_factory=list)  # with their ends
    _begin: int = 0
    _read: int = 0
    _whole: WrittenPieces | None = None

    def __post_init__(self) -> None:
        self.ids = list(self.ids[-_BEFORE:])
        self._read = len(self.ids)
        if cleans_up(self.tokenizer):  # a new token may change the text before it
            self._whole = WrittenPieces(self.tokenizer)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return written_text(self.tokenizer, ids)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with special ones."""
        return whole_text(self.tokenizer, ids)

    def next_text(self, token: int) -> str:
        """Return the text that a token adds; "" if it ends within a character."""
        if self._whole is not None:
            return self._whole.add([token])
        self.ids.append(token)
        added = self._undecoded()
        if not added or added.endswith(INCOMPLETE):
            return ""
        self._begin, self._read = self._read, len(self.ids)
        return added

    def _undecoded(self) -> str:
        """Return the text of the tokens not returned yet, decoded after earlier tokens."""
        if self._whole is not None:
            return self._whole.end()
        before = self.decode(self.ids[self._begin : self._read])
        return self.decode(self.ids[self._begin :])[len(before) :]

    def add(self, token: GeneratedToken) -> Piece | None:
        """Add a token, and return the text that is now certain, if any."""
        text = self._held + token.text
        self._waiting.append((len(self.text) + len(text), token))
        places = [place for place in map(text.find, self.stop) if place >= 0]
        if places:
            self.stopped = True
            return self._given_out(text[: min(places)], "")
        kept = max((_overlap(text, stop) for stop in self.stop), default=0)
        return self._given_out(text[: len(text) - kept], text[len(text) - kept :])

    def end(self) -> Piece | None:
        """Return the text held back, now that the text is complete."""
        rest = "" if self.stopped else self._held + self._undecoded()
        piece = self._given_out(rest, "")
        tokens = tuple(token for _, token in self._waiting) if not self.stopped else ()
        self._waiting = []
        self.tokens += tokens
        if not tokens:
            return piece
        return Piece(piece.text if piece else "", (*(piece.tokens if piece else ()), *tokens))

    def _given_out(self, text: str, held: str) -> Piece | None:
        self.text += text
        self._held = held
        end = len(self.text)
        tokens = tuple(token for place, token in self._waiting if place <= end)
        self._waiting = self._waiting[len(tokens) :]
        self.tokens += tokens
        return Piece(text, tokens) if text or tokens else None


def whole_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of tokens with special ones, such as the whole prompt of a model."""
    kept = cleans_up(tokenizer)
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=kept))


def texts_of_tokens(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text that each token of a prompt adds; "" if it ends within a character."""
    texts, begin, read = [""] * len(ids), 0, 0
    for end in range(1, len(ids) + 1):
        before = whole_text(tokenizer, ids[begin:read])
        added = whole_text(tokenizer, ids[begin:end])[len(before) :]
        if added and (end == len(ids) or not added.endswith(INCOMPLETE)):
            texts[end - 1] = added
            begin, read = read, end
    return texts


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of a text may begin a stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)

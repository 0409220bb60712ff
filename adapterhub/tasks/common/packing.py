"""Windows of streamed text: rows of one length, cut from tokens on disk, without padding.

The documents of a stream are joined, each with its separators, and cut into windows that cross
document boundaries (FULL-SENTENCES of Liu et al. 2019, section 4.2,
https://arxiv.org/abs/1907.11692). The last window is shorter.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapterhub.data.examples import Example
from adapterhub.data.text_stream import StreamedText, TextStream, stored_tokens
from adapterhub.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from adapterhub.data.text_stream import Tokens

STARTS_WORD = 1 << 31  # a flag of a token on disk; ids are smaller


@dataclass(frozen=True)
class Frame:
    """The special tokens around documents and windows.

    Attributes:
        begin: the tokens before each document.
        end: the tokens after each document.
        before: the tokens before each window.
        after: the tokens after each window.
        room: the number of tokens that a window leaves free for later additions.
        words: whether the first token of each word is flagged.
    """

    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    room: int = 0
    words: bool = False

    def size(self, limit: int) -> int:
        """Return the tokens of the text in a window of `limit` tokens."""
        return max(limit - len(self.before) - len(self.after) - self.room, 1)


class Windows(Sequence[Any]):
    """The windows of some tokens, as rows; each is built when it is read.

    `tokens` have flags, (tokens,). `build` makes a row of `limit` ids from its ids and the
    positions where words start.
    """

    def __init__(
        self,
        tokens: Tokens,
        frame: Frame,
        limit: int,
        build: Callable[[list[int], list[int]], Any],
    ) -> None:
        self.tokens, self.frame, self.limit, self.build = tokens, frame, limit, build
        self.size = frame.size(limit)
        self.total = -(-len(tokens) // self.size)
        # A single token has nothing to learn.
        if self.total > 1 and len(tokens) - (self.total - 1) * self.size < 2:
            self.total -= 1

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int | slice) -> Any:
        chosen = range(self.total)[index]
        return self._row(chosen) if isinstance(chosen, int) else [self._row(i) for i in chosen]

    def __iter__(self) -> Iterator[Any]:
        return map(self._row, range(self.total))

    @property
    def lengths(self) -> list[int]:
        """The length of each row."""
        around = len(self.frame.before) + len(self.frame.after)
        last = min(len(self.tokens) - (self.total - 1) * self.size, self.size)
        return [self.size + around] * (self.total - 1) + [last + around]

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> Windows:
        """Return the windows as examples, for reports."""

        def decoded(ids: list[int], starts: list[int]) -> Example:
            return Example(str(tokenizer.decode(ids, skip_special_tokens=True)))

        return Windows(self.tokens, self.frame, self.limit, decoded)

    def _row(self, index: int) -> Any:
        flagged = self.tokens[index * self.size : (index + 1) * self.size]
        ids: list[int] = (flagged & (STARTS_WORD - 1)).tolist()
        starts = (flagged >= STARTS_WORD).nonzero()[0] + len(self.frame.before)
        return self.build([*self.frame.before, *ids, *self.frame.after], starts.tolist())


def stream_tokens(texts: TextStream, tokenizer: PreTrainedTokenizerBase, frame: Frame) -> Tokens:
    """Return the tokens of a stream, with the separators of documents.

    Raises:
        DataError: there are fewer than two tokens.
    """
    import numpy as np

    starts = True

    def tokenize(group: Sequence[StreamedText]) -> Tokens:
        nonlocal starts
        pieces = [text.text for text in group]
        encoded = tokenizer(pieces, add_special_tokens=False, verbose=False)  # long ones are cut
        stream: list[int] = []
        for index, (text, ids) in enumerate(zip(group, encoded["input_ids"], strict=True)):
            stream += frame.begin if starts else ()
            flags = word_starts(encoded, index, text.text) if frame.words else frozenset()
            stream += [i | STARTS_WORD if n in flags else i for n, i in enumerate(ids)]
            stream += frame.end if text.ends else ()
            starts = text.ends
        return np.array(stream, dtype=np.uint32)

    key = [_identity(tokenizer), list(frame.begin), list(frame.end), frame.words]
    tokens = stored_tokens(texts, key, tokenize)
    if len(tokens) < 2:
        raise DataError(f"{texts.source} has only {len(tokens)} token")
    return tokens


@functools.lru_cache(maxsize=8)
def around_text(tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens that a tokenizer puts before and after a text."""
    ids: list[int] = tokenizer("a")["input_ids"]
    inner: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    start = next(i for i in range(len(ids) + 1) if ids[i : i + len(inner)] == inner)
    return tuple(ids[:start]), tuple(ids[start + len(inner) :])


def word_starts(encoded: Any, index: int, text: str) -> frozenset[int]:
    """Return the positions of the tokens that begin a word.

    Words are defined by the tokenizer's pre-tokenizer: BERT's splits at punctuation, others at
    spaces. Without a pre-tokenizer, a word begins at the start and after a space, by the offsets of
    the tokens.

    `encoded` is the output of a fast tokenizer without special tokens, and `index` the row of the
    text.
    """
    encoding = encoded.encodings[index]
    words = encoding.word_ids  # None at special tokens
    if len({*words} - {None}) > 1 or " " not in text.strip():
        pairs = zip(words, [None, *words[:-1]], strict=True)
        return frozenset(n for n, (word, before) in enumerate(pairs) if word != before)
    return frozenset(
        n
        for n, (first, _) in enumerate(encoding.offsets)
        if n == 0 or text[first : first + 1].isspace() or text[first - 1 : first].isspace()
    )


def _identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of everything that determines the tokens of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return hashlib.sha256(backend.to_str().encode()).hexdigest()
    record = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    return hashlib.sha256(repr(record).encode()).hexdigest()

"""Requests for texts generated token by token, and their results while they are generated."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field, fields

from adapterhub.errors import ConfigError
from adapterhub.web.errors import DeadlineError

MOST_LOGPROBS = 20
_MOST_STOPS = 16


@dataclass(frozen=True)
class GenerationOptions:
    """Options for generating a text.

    Attributes:
        max_tokens: the longest text, in tokens; None: the limit recorded in the adapter's training,
            or 256. The context of the model always limits a text. 0: only read the prompt, for
            `prompt_logprobs`.
        temperature: divides the logits before sampling; 0 chooses the most probable token.
        top_p: sample from the most probable tokens that have this probability together.
        top_k: sample from this many most probable tokens; 0: from all.
        seed: the same seed and request give the same text, whatever else is computed meanwhile.
        stop: texts that end the text, and are not part of it.
        logprobs: the number of alternatives to list for each token, with their log-probabilities;
            0: only the log-probability of the token, None: nothing.
        prompt_logprobs: the number of alternatives to list for each token of the prompt, likewise.
        src_lang: the language of the prompt, for adapters that translate between several, as the
            tokenizer names it; None: the language of the training.
        tgt_lang: the language of the text, likewise.

    Raises:
        ConfigError: an option is out of range.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    src_lang: str | None = None
    tgt_lang: str | None = None

    def __post_init__(self) -> None:
        tests: dict[str, Callable[..., bool]] = {
            "max_tokens": lambda n: n is None or n >= (self.prompt_logprobs is None),
            "temperature": lambda t: 0 <= t < math.inf,
            "top_p": lambda p: 0 < p <= 1,
            "top_k": lambda k: k >= 0,
            "seed": lambda n: n is None or abs(n) < 1 << 63,
            "stop": lambda texts: len(texts) <= _MOST_STOPS and all(texts),
            "logprobs": lambda n: n is None or 0 <= n <= MOST_LOGPROBS,
            "prompt_logprobs": lambda n: n is None or 0 <= n <= MOST_LOGPROBS,
        }
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        if problems := [
            f"{n} is {values[n]!r}" for n, test in tests.items() if not test(values[n])
        ]:
            raise ConfigError(
                ", ".join(problems),
                expected="max_tokens of 1 or more, a temperature of 0 or more, a top_p above 0 up "
                "to 1, a top_k of 0 or more, a seed of 64 bits, at most "
                f"{_MOST_STOPS} stop texts that are not empty, "
                f"and logprobs and prompt_logprobs from 0 to {MOST_LOGPROBS}",
            )


@dataclass(frozen=True)
class GeneratedToken:
    """A generated token.

    `text` is the text that it adds, "" if it only begins or continues a character. `logprob` and
    `alternatives`, the most probable tokens at its place, are set if they were requested.
    """

    id: int
    text: str
    logprob: float | None = None
    alternatives: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class PromptToken:
    """A token of a prompt, with its probability after the tokens before it.

    The first token has no `logprob` and no `rank`. `rank` is 1 for the most probable token.
    `alternatives` are the most probable tokens at its place: id, text and log-probability.
    """

    id: int
    text: str
    logprob: float | None = None
    rank: int | None = None
    alternatives: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """A part of a text, with whole characters and without any part of a stop text."""

    text: str
    tokens: tuple[GeneratedToken, ...]


@dataclass(frozen=True)
class GeneratedText:
    """A complete text.

    Attributes:
        text: the text.
        tokens: its tokens, including an end token.
        finish_reason: "stop", or "length" if it was cut.
        prompt_tokens: the tokens of the prompt.
        completion_tokens: the tokens that were computed.
        first_token_seconds: the time from the request to its first token.
        seconds: the time from the request to its last token.
    """

    text: str
    tokens: tuple[GeneratedToken, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    first_token_seconds: float = 0.0
    seconds: float = 0.0


OnPiece = Callable[[Piece], None]
OnEnd = Callable[[GeneratedText | BaseException], None]


@dataclass(eq=False)
class TextGeneration:
    """A text in progress.

    Attributes:
        reference: the adapter that generates it, with its version, once it is resolved.
        digest: the sha256 of its manifest.
        asked: the time of the request.
        prompt: the tokens of the prompt before the first piece, if `prompt_logprobs` were
            requested.
    """

    reference: str = ""
    digest: str = ""
    asked: float = field(default_factory=time.monotonic)
    prompt: tuple[PromptToken, ...] = ()
    _pieces: list[Piece] = field(default_factory=list)
    _end: GeneratedText | BaseException | None = None
    _listeners: list[tuple[OnPiece, OnEnd]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def listen(self, on_piece: OnPiece, on_end: OnEnd) -> None:
        """Call functions with each piece, and with the text or the error at the end.

        Existing pieces are passed at once. Later calls come from the compute thread, so the
        functions must be fast. A function that raises an error is not called again.
        """
        with self._changed:
            for piece in self._pieces:
                on_piece(piece)
            if self._end is not None:
                on_end(self._end)
            else:
                self._listeners.append((on_piece, on_end))

    def result(self, timeout: float | None = None) -> GeneratedText:
        """Return the text once it is complete.

        Raises:
            TimeoutError: it is not complete after `timeout` seconds.
            CancelledError: it was cancelled.
            AdapterhubError: it cannot be generated; the error contains the reason.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._end is not None, timeout):
                raise TimeoutError
        return self._whole()

    def __iter__(self) -> Iterator[Piece]:
        """Yield the pieces as they arrive; raise as `result` does."""
        number = 0
        while new := self._pieces_from(number):
            yield from new
            number += len(new)
        self._whole()

    def _pieces_from(self, number: int) -> list[Piece]:
        """Return the pieces from an index on, once there are some; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._pieces) > number or self.done)
            return self._pieces[number:]

    def _whole(self) -> GeneratedText:
        assert self._end is not None
        if isinstance(self._end, BaseException):
            raise self._end
        return self._end

    @property
    def done(self) -> bool:
        """Whether the text is complete, has failed or was cancelled."""
        return self._end is not None

    @property
    def outcome(self) -> str:
        """The outcome: texts, cancelled, expired or errors."""
        if isinstance(self._end, GeneratedText):
            return "texts"
        if isinstance(self._end, DeadlineError):
            return "expired"
        return "cancelled" if isinstance(self._end, CancelledError) else "errors"

    def cancel(self) -> None:
        """Cancel the text; its resources are freed before the next token is computed."""
        self.finish(CancelledError())

    def deliver(self, piece: Piece) -> None:
        """Add a piece, unless the text has ended."""
        with self._changed:
            if self.done:
                return
            self._pieces.append(piece)
            self._changed.notify_all()
            listeners = []
            for listener in self._listeners:
                with suppress(Exception):  # a client that disconnected
                    listener[0](piece)
                    listeners.append(listener)
            self._listeners = listeners

    def finish(self, end: GeneratedText | BaseException) -> bool:
        """End the text; return False if it had already ended."""
        with self._changed:
            if self.done:
                return False
            self._end = end
            self._changed.notify_all()
            listeners, self._listeners = self._listeners, []
            for _, on_end in listeners:
                with suppress(Exception):
                    on_end(end)
            return True

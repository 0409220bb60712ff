"""How a text is written in one call: the options of the user, and its pieces as they come."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, fields, replace
from queue import Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from adapterhub.errors import ConfigError
from adapterhub.status import Display, showing
from adapterhub.tasks._base import Task
from adapterhub.tasks._languages import language_ids

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

_SEARCH: ContextVar[Mapping[str, Any] | None] = ContextVar("search", default=None)


@dataclass(frozen=True)
class Writing:
    """How texts are written in some calls; None: as the task records it, without sampling.

    Attributes:
        max_new_tokens: the longest text, in tokens.
        temperature: divides the logits of the tokens that are sampled; 0 takes the most probable.
        top_p: samples from the most probable tokens that have this probability together.
        beams: of the search.

    Raises:
        ConfigError: an option is out of range.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    beams: int | None = None

    def __post_init__(self) -> None:
        tests: dict[str, Callable[[float], bool]] = {
            "max_new_tokens": lambda n: 0 < n <= 100_000,
            "temperature": lambda t: 0 <= t < math.inf,
            "top_p": lambda p: 0 < p <= 1,
            "beams": lambda n: 0 < n <= 1000,
        }
        if found := [f"{n} is {v}" for n, v in self.given.items() if not tests[n](v)]:
            raise ConfigError(
                ", ".join(found),
                expected="1 to 100000 tokens, a temperature of 0 or more, a top_p above 0 up to 1, "
                "1 to 1000 beams",
            )

    @property
    def given(self) -> dict[str, Any]:
        """The options that are not None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def applied(self, task: Task) -> Task:
        """Return a task that generates, with the length and the beams of these options."""
        own = {"new_tokens": self.max_new_tokens, "beams": self.beams}
        return replace(task, **{name: v for name, v in own.items() if v is not None})  # type: ignore[type-var]

    @contextmanager
    def sampling(self, **more: Any) -> Iterator[None]:
        """Let `generate` sample inside, if these options do; `more` are for `model.generate`."""
        sampled = self.temperature != 0 and {self.temperature, self.top_p} != {None}
        how = {"temperature": self.temperature or 1.0, "top_p": self.top_p or 1.0, "top_k": 0}
        token = _SEARCH.set(({"do_sample": True} | how if sampled else {}) | more)
        try:
            yield
        finally:
            _SEARCH.reset(token)


def chosen_search() -> Mapping[str, Any]:
    """Return the options of `model.generate` that this context has chosen."""
    return _SEARCH.get() or {}


INCOMPLETE = "\ufffd"  # what a decoder writes for bytes that are no character yet
_LOSSY = ("WordPiece", "NoneType")  # decoders that put a space between words, and had others
_UNSETTLED = 8  # characters that a later token may still change where spaces are cleaned up


def cleans_up(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether spaces before punctuation are taken out of decoded texts.

    A tokenizer whose tokens lost the spaces of the text puts one between all of them, and takes
    some out again if its configuration says so. One whose tokens have their spaces, of bytes or of
    pieces of sentences, returns the text as it is, whatever its configuration says: it would
    otherwise change what was written.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    loses = backend is not None and type(backend.decoder).__name__ in _LOSSY
    return loses and bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))


def written_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of tokens that a model wrote, without special tokens and languages.

    All texts that are generated are decoded here: of evaluations, predictions, streams and servers.
    """
    codes = {*language_ids(tokenizer).values()}  # which are not special in every tokenizer
    return str(
        tokenizer.decode(
            [i for i in ids if i not in codes],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=cleans_up(tokenizer),
        )
    )


class WrittenPieces:
    """The pieces of a text, token by token; together they are the text.

    A piece ends where a later token changes nothing any more: a token may end within a character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.ids, self.given = tokenizer, list[int](), 0

    def add(self, ids: Sequence[int]) -> str:
        """Return what tokens add."""
        self.ids += ids
        text = written_text(self.tokenizer, self.ids)
        settled = text.rstrip(INCOMPLETE)
        if cleans_up(self.tokenizer):
            settled = settled[:-_UNSETTLED]
        return self._piece(settled)

    def end(self) -> str:
        """Return what was held back."""
        return self._piece(written_text(self.tokenizer, self.ids))

    def _piece(self, text: str) -> str:
        piece = text[self.given :]
        self.given += len(piece)
        return piece


class _Streamer:
    """Gives out the pieces of one text, which `generate` writes in another thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip: bool) -> None:
        self.text, self.skip = WrittenPieces(tokenizer), skip
        self.queue: Queue[str | None] = Queue()

    def put(self, ids: Tensor) -> None:
        """Take tokens; the first are those of the prompt, if there is one."""
        if self.skip:
            self.skip = False
        else:
            self.queue.put(self.text.add(ids.flatten().tolist()))

    def end(self) -> None:
        """Give out the rest."""
        self.queue.put(self.text.end())

    def close(self) -> None:
        """Let the reader end."""
        self.queue.put(None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.queue.get, None)


def streamed(
    write: Callable[[], object], tokenizer: PreTrainedTokenizerBase, how: Writing, *, prompt: bool
) -> Iterator[str]:
    """Yield the pieces of the text that `write`, a call of `generate` for one prompt, writes.

    It runs in a thread, and ends early if no more pieces are taken. With `prompt` the tokens of the
    prompt come first. Together the pieces are the text.

    Raises:
        Exception: what `write` raises.
    """
    from transformers import StoppingCriteriaList

    pieces = _Streamer(tokenizer, prompt)
    unwanted, raised = Event(), list[Exception]()
    ends = StoppingCriteriaList([lambda ids, scores, **_: unwanted.is_set()])

    def work() -> None:
        try:
            # A bar would erase the line that the pieces are on.
            with showing(Display()), how.sampling(streamer=pieces, stopping_criteria=ends):
                write()
        except Exception as error:
            raised.append(error)
        finally:
            pieces.close()

    thread = Thread(target=copy_context().run, args=(work,), daemon=True)
    thread.start()
    begun, held = False, ""
    try:
        for piece in pieces:
            text = held + piece if begun else (held + piece).lstrip()
            kept = text.rstrip()  # space at the end of a text is no part of it
            begun, held = begun or bool(kept), text[len(kept) :]
            if kept:
                yield kept
    finally:
        unwanted.set()
        thread.join()
    if raised:
        raise raised[0]

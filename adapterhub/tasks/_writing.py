"""How a text is written in one call: the options of the user, and its pieces as they come."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, fields, replace
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from adapterhub.errors import ConfigError
from adapterhub.status import Display, showing
from adapterhub.tasks._base import Task

if TYPE_CHECKING:
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


def streamed(
    write: Callable[[], object], tokenizer: PreTrainedTokenizerBase, how: Writing, *, prompt: bool
) -> Iterator[str]:
    """Yield the pieces of the text that `write`, a call of `generate` for one prompt, writes.

    It runs in a thread, and ends early if no more pieces are taken. With `prompt` the tokens of the
    prompt come first. Together the pieces are the text.

    Raises:
        Exception: what `write` raises.
    """
    from transformers import StoppingCriteriaList, TextIteratorStreamer

    pieces = TextIteratorStreamer(tokenizer, skip_prompt=prompt, skip_special_tokens=True)
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
            pieces.end()

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

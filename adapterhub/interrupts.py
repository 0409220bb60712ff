"""Changes that are made wholly or not at all, also if Ctrl-C arrives in the middle.

A signal may arrive before any line of Python: inside of a change, or at the first line of a
`finally` block or of an `__exit__`. `deferred_interrupts` delivers it after a short change, and the
exit of a `Reversal` runs even if it was interrupted before its first line. Only SIGINT is deferred,
in the main thread, where Python runs signal handlers.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class DeferredInterrupts:
    """Records SIGINT inside, and calls the handler at the end: Ctrl-C stays what the user set."""

    __slots__ = ("arrived", "handler")

    def __init__(self) -> None:
        self.handler: Any = None
        self.arrived = False

    def __call__(self, number: int, frame: object) -> None:
        """Record a signal: the handler inside."""
        self.arrived = True

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            # A handler that is not Python's does not raise; inside another one of these, that does.
            if callable(handler) and not isinstance(handler, DeferredInterrupts):
                self.handler = handler
                try:
                    signal.signal(signal.SIGINT, self)
                except ValueError:  # a subinterpreter has no signals
                    self.handler = None

    def __exit__(self, *error: object) -> None:
        if self.handler is None:
            return
        current = signal.signal(signal.SIGINT, self.handler)
        if current is not self:
            signal.signal(signal.SIGINT, current)  # it was exchanged inside
        if self.arrived:
            self.handler(signal.SIGINT, None)


def deferred_interrupts() -> DeferredInterrupts:
    """Return a context in which Ctrl-C is recorded; it takes effect at the end.

    The block must be short, and wait for nothing.
    """
    return DeferredInterrupts()


class _Exit:
    """The `__exit__` of a `Reversal`.

    A `with` statement reads it before it enters, and drops it last. If an interrupt hits its call,
    or a line between its reading and its call, then the drop closes the context.
    """

    @overload
    def __get__(self, context: None, owner: type) -> Callable[..., None]: ...

    @overload
    def __get__(self, context: Reversal[Any], owner: type) -> Callable[..., None]: ...

    def __get__(self, context: Reversal[Any] | None, owner: type) -> Callable[..., None]:
        if context is None:  # contextlib.ExitStack calls it with the context
            return _close
        close = partial(_close, context)
        if not context._open:  # else somebody only looks at it
            context._watch = weakref.ref(close, lambda _: _close(context))
        return close


class Reversal(Generic[T]):
    """A context that changes something, and undoes it at the end: always, and once.

    `enter` and `leave` are called with interrupts deferred. `leave` may find any part of `enter`
    done, and any part of an earlier `leave`. `lock` is held by both.
    """

    lock: AbstractContextManager[Any] = nullcontext()

    _watch: weakref.ref[Callable[..., None]] | None = None
    _open = False

    def enter(self) -> T:
        """Make the change."""
        raise NotImplementedError

    def leave(self) -> None:
        """Undo the change."""
        raise NotImplementedError

    def __enter__(self) -> T:
        if self._open:
            raise RuntimeError(f"{type(self).__name__} is entered already")
        try:
            with self.lock, deferred_interrupts():  # Ctrl-C may end the wait for a lock
                self._open = True
                return self.enter()
        except BaseException:
            _close(self)
            raise

    __exit__ = _Exit()


def _close(
    context: Reversal[Any],
    kind: type[BaseException] | None = None,
    error: BaseException | None = None,
    traceback: TracebackType | None = None,
) -> None:
    """Leave a context, unless that is done."""
    with deferred_interrupts(), context.lock:
        if context._open:
            context.leave()
            context._open = False
        context._watch = None

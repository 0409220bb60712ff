"""Defer Ctrl-C until a change is complete."""

from __future__ import annotations

import signal
import threading
from typing import Any


class DeferredInterrupts:
    """Records SIGINT inside, and calls the handler at the end: Ctrl-C stays what the user set.

    Only in the main thread, where Python runs signal handlers.
    """

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

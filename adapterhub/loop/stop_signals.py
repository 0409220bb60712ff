"""Ctrl-C and SIGTERM stop a run after the current step, once its state is saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from adapterhub.errors import TrainingError


class Stopped(TrainingError):
    """A signal stopped the run, after its state was saved."""


class StopRequest:
    """Whether a signal requested that the run stop after the current step.

    One of several runs passes a request on to those that it is one of.
    """

    def __init__(self) -> None:
        self.requested = False
        self.outer: StopRequest | None = None

    def receive(self, number: int, frame: object) -> None:
        """Handle a signal; a second one interrupts at once."""
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self.outer is not None:
            self.outer.requested = True

    def inherit(self, handler: object) -> None:
        """Take on the request, and the signals, of a handler that this one replaces."""
        outer = getattr(handler, "__self__", None)
        if isinstance(outer, StopRequest):
            self.outer, self.requested = outer, outer.requested


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Record SIGINT and SIGTERM while the block runs; a second signal interrupts at once."""
    stop = StopRequest()
    # Python allows signal handlers only in the main thread.
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    before = {number: signal.signal(number, stop.receive) for number in numbers}
    for handler in before.values():
        stop.inherit(handler)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

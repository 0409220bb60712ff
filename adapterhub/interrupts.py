"""Defer Ctrl-C until a change is complete."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Record Ctrl-C inside the block, and call the user's signal handler at its end.

    The block must be short and must not wait. Python runs signal handlers in the main thread only.
    Handlers that were not installed from Python raise nothing and stay in place.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    arrived = []

    def record(number: int, frame: object) -> None:
        arrived.append(number)

    signal.signal(signal.SIGINT, record)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(signal.SIGINT, None)

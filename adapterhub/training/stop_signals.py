"""Ctrl-C and SIGTERM stop a run after the current step, once its state is saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class StopRequest:
    """Whether a signal requested that the run stop after the current step."""

    requested = False


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Record SIGINT and SIGTERM while the block runs; a second signal interrupts at once."""
    stop = StopRequest()

    def request(number: int, frame: object) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    # Python allows signal handlers only in the main thread.
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    before = {number: signal.signal(number, request) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

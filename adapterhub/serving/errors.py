"""Errors of requests that are not answered."""

from __future__ import annotations

import torch

from adapterhub.errors import DataError, ServingError, counted


class OverloadedError(ServingError):
    """The queue is full.

    Attributes:
        wait: the seconds until the queue is computed, at the rate measured so far.
    """

    def __init__(self, tokens: int, limit: int, wait: float) -> None:
        self.wait = wait
        super().__init__(
            f"the queue is full: {counted(tokens, 'token')} are waiting",
            expected=f"at most {limit:,}",
            hint=f"the same request again in {max(wait, 0.1):.1f} s, or a larger queue_tokens",
        )


class DeadlineError(ServingError):
    """The deadline of a request has passed before it was computed completely."""

    def __init__(self, late: float, what: str = "computed") -> None:
        super().__init__(
            f"the deadline passed {late:.3f} s before the request was {what}",
            expected="a deadline that is longer than the queue",
            hint="a longer deadline, or fewer requests at once",
        )


class StoppedError(ServingError):
    """The engine has stopped computing: it was closed, or its thread died."""


class ComputationError(ServingError):
    """The adapter has computed numbers that are not finite."""


class TooLargeError(ServingError):
    """The memory of the device is too small for one request alone."""


class TooLongError(DataError):
    """An input exceeds the adapter's longest input, and must not be cut."""

    def __init__(self, lost: int, limit: int) -> None:
        super().__init__(
            f"the input is too long: {counted(lost, 'token')} would be cut",
            expected=f"at most {limit:,} tokens",
            hint='a shorter input, or "truncate": true',
        )


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an allocation has failed; on a CPU, only torch's message shows this."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)

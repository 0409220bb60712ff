"""Build modules without their initial values, which a file overwrites afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_SKIP_INIT: ContextVar[bool] = ContextVar("skip_init", default=False)


@contextmanager
def skip_init() -> Iterator[None]:
    """Skip expensive initializations inside, and leave torch's random state unchanged."""
    token = _SKIP_INIT.set(True)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        _SKIP_INIT.reset(token)


def init_is_skipped() -> bool:
    """Return whether modules are built inside `skip_init`."""
    return _SKIP_INIT.get()

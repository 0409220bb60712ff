"""Build modules without their initial values, which a file overwrites afterwards."""

from __future__ import annotations

from contextvars import ContextVar

import torch
from torch import Tensor

from adapterhub.interrupts import Reversal

_SKIP_INIT: ContextVar[bool] = ContextVar("skip_init", default=False)


class SkippedInit(Reversal[None]):
    """Skips expensive initializations, and leaves torch's random state unchanged."""

    def __init__(self) -> None:
        self._before: tuple[bool, Tensor] | None = None

    def enter(self) -> None:
        """Remember the random state."""
        self._before = _SKIP_INIT.get(), torch.random.get_rng_state()
        _SKIP_INIT.set(True)

    def leave(self) -> None:
        """Restore the random state."""
        if self._before is not None:
            skipped, random = self._before
            _SKIP_INIT.set(skipped)
            torch.random.set_rng_state(random)


def skip_init() -> SkippedInit:
    """Skip expensive initializations inside, and leave torch's random state unchanged."""
    return SkippedInit()


def init_is_skipped() -> bool:
    """Return whether modules are built inside `skip_init`."""
    return _SKIP_INIT.get()

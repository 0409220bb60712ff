"""Which tokens are learned, told to a pass whose model gets no labels.

An evaluation, or a loss of our own, calls a model without them; what changes tokens by their places
still has to know where prompts end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_LABELS: ContextVar[Tensor | None] = ContextVar("learned_tokens", default=None)


@contextmanager
def learned_tokens(labels: Tensor | None) -> Iterator[None]:
    """Tell the calls inside the labels of their tokens, (batch, tokens), -100 where none is."""
    token = _LABELS.set(labels)
    try:
        yield
    finally:
        _LABELS.reset(token)


def labels_of_tokens() -> Tensor | None:
    """Return the labels that this context has told; None: nothing."""
    return _LABELS.get()

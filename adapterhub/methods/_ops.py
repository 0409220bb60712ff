"""Arithmetic that site modules share, and modules whose values come afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_BLANK: ContextVar[bool] = ContextVar("blank", default=False)


@contextmanager
def skip_init() -> Iterator[None]:
    """Modules that are made inside get their values afterwards: costly initial ones are left out,
    and torch's generators stay as they are."""
    token = _BLANK.set(True)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        _BLANK.reset(token)


def skips_init() -> bool:
    """Whether initial values will be overwritten."""
    return _BLANK.get()


def cast(parameter: Tensor, like: Tensor) -> Tensor:
    """A parameter in the dtype that a product with `like` needs; autocast chooses for itself."""
    if parameter.dtype == like.dtype or torch.is_autocast_enabled(like.device.type):
        return parameter
    return parameter.to(like.dtype)


def add_product(y: Tensor, u: Tensor, weight: Tensor, scale: float) -> Tensor:
    """y + scale * u weightᵀ in one pass. y: (..., d_out), u: (..., r), weight: (d_out, r)."""
    rows = y.reshape(-1, y.shape[-1])
    u = u.reshape(-1, u.shape[-1]).to(y.dtype)
    return torch.addmm(rows, u, cast(weight, y).T, alpha=scale).view(y.shape)

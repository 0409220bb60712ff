"""Build modules without their initial values, which a file overwrites afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_SKIP_INIT: ContextVar[bool] = ContextVar("skip_init", default=False)


@contextmanager
def skip_init() -> Iterator[None]:
    """Skip expensive initializations inside, and leave torch's random state unchanged."""
    skipped, random = _SKIP_INIT.get(), torch.random.get_rng_state()
    try:
        _SKIP_INIT.set(True)
        yield
    finally:
        _SKIP_INIT.set(skipped)
        torch.random.set_rng_state(random)


def init_is_skipped() -> bool:
    """Return whether modules are built inside `skip_init`."""
    return _SKIP_INIT.get()


# Not the methods of tensors that these call: a loop may draw until it has what it accepts.
_FILLS = frozenset(getattr(nn.init, f"{d}_") for d in ("uniform", "normal", "kaiming_uniform"))


class _Undrawn(TorchFunctionMode):
    """Leaves tensors as they are allocated where `nn.init` would draw values, in this thread."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, unless it draws values for a tensor."""
        options = kwargs or {}
        if function in _FILLS:
            return args[0] if args else options["tensor"]
        return function(*args, **options)


def undrawn() -> AbstractContextManager[Any]:
    """Return a context in which `nn.init` draws no values, inside `skip_init`."""
    return _Undrawn() if init_is_skipped() else nullcontext()

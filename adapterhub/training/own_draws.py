"""Random numbers of runs that share a process, and a forward pass: each run draws its own.

A run draws from torch's, numpy's and Python's global generators. Between its turns their states are
kept here. In a pass that several runs share, dropout is drawn run by run, for the rows of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from adapterhub.training import checkpoint


class RandomNumbers:
    """The states of the global generators for one run, while others draw."""

    def __init__(self) -> None:
        self.state = checkpoint.random_state()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Draw this run's random numbers inside."""
        checkpoint.set_random_state(self.state)
        try:
            yield
        finally:
            self.state = checkpoint.random_state()

    def copy(self) -> dict[str, Any]:
        """Return the states, to which `state` may be set again."""
        return self.state | {"cuda": list(self.state["cuda"])}

    def draw(self, device: torch.device, compute: Callable[..., Any], *inputs: Any) -> Any:
        """Compute with this run's random numbers on a device; the global generator stays.

        Args:
            device: where random numbers are drawn.
            compute: a function that draws.
            inputs: its arguments.
        """
        states, key = (self.state, "torch") if device.type == "cpu" else (self.state["cuda"], None)
        number: Any = key or device.index or 0
        before = generator_state(device)
        _set_generator_state(device, states[number])
        try:
            return compute(*inputs)
        finally:
            states[number] = generator_state(device)
            _set_generator_state(device, before)


def generator_state(device: torch.device) -> Tensor:
    """Return the state of torch's global generator for a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_generator_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class OwnRows(NamedTuple):
    """The rows of one run in a shared batch: their number, the run's random numbers and modules."""

    number: int
    random: RandomNumbers
    modules: Sequence[nn.Module]


def drawing_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """List the modules of a run that draw random numbers, or have a part that does."""
    return [module for module in modules if any(map(_draws, module.modules()))]


def _draws(module: nn.Module) -> bool:
    rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(rate, float | int) and rate > 0


@contextmanager
def own_draws(
    modules: Iterable[nn.Module], rows: Sequence[OwnRows], device: torch.device
) -> Iterator[None]:
    """Let dropout draw the random numbers of each run inside, as if its rows were alone.

    Args:
        modules: those that all rows pass through.
        rows: the rows of each run, in order, and the modules that only they pass through.
        device: where they are computed.
    """
    shared: list[nn.Module] = [
        m for m in modules if m.training and isinstance(m, _DropoutNd) and m.p > 0
    ]
    replaced: list[nn.Module] = []
    try:
        for module in shared:
            replaced.append(module)
            module.forward = partial(_draw_by_rows, module.forward, rows, device)
        for each in rows:
            for module in each.modules:
                replaced.append(module)
                module.forward = partial(each.random.draw, device, module.forward)
        yield
    finally:
        for module in replaced:
            module.__dict__.pop("forward", None)


def _draw_by_rows(
    compute: Callable[[Tensor], Tensor], rows: Sequence[OwnRows], device: torch.device, x: Tensor
) -> Tensor:
    """Apply dropout to the rows of each run; a batch may repeat each row, as for choices."""
    copies = max(len(x) // sum(each.number for each in rows), 1)
    parts = torch.split(x, [each.number * copies for each in rows])
    drawn = [
        each.random.draw(device, compute, part) for each, part in zip(rows, parts, strict=True)
    ]
    return torch.cat(drawn)

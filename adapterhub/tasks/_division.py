"""Batches divided over the processes of a run: each computes some, and all get all results.

Process p of N computes the batches p, p + N, ... The batches are those of a single process, so the
results are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

B = TypeVar("B")
T = TypeVar("T")


@dataclass(frozen=True)
class Division:
    """The processes that divide batches.

    Attributes:
        index: the number of this process, from 0.
        count: the number of processes.
        gather: returns what each process gives, in their order; all call it together.
        in_step: whether all must compute as many batches, since they compute each one together
            (sharded parameters).
    """

    index: int
    count: int
    gather: Callable[[Any], list[Any]]
    in_step: bool = False

    def compute(self, batches: Iterable[B], compute: Callable[[B], T]) -> list[T]:
        """Return the result of each batch, in their order.

        The batches are the same ones in each process; results are sent to the others.
        """
        own, total, last = list[T](), 0, list[B]()
        for total, batch in enumerate(batches, start=1):
            last = [batch]
            if (total - 1) % self.count == self.index:
                own.append(compute(batch))
        if self.in_step and 0 < total % self.count <= self.index:
            compute(*last)  # others still compute
        every: list[list[T]] = self.gather(own)
        return [every[i % self.count][i // self.count] for i in range(total)]


_DIVISION: ContextVar[Division | None] = ContextVar("division", default=None)


@contextmanager
def dividing(division: Division) -> Iterator[None]:
    """Divide all batches inside."""
    token = _DIVISION.set(division)
    try:
        yield
    finally:
        _DIVISION.reset(token)


def results(batches: Iterable[B], compute: Callable[[B], T]) -> list[T]:
    """Return the result of each batch, in their order; processes may divide them."""
    division = _DIVISION.get()
    if division is None:
        return [compute(batch) for batch in batches]
    return division.compute(batches, compute)


def in_step() -> bool:
    """Return whether other processes compute batches of their own together with this one's."""
    division = _DIVISION.get()
    return division is not None and division.in_step

"""Which cases of a long table run: one eighth by default, all with ADAPTERHUB_TESTS=all or
ADAPTERHUB_MATRIX=full.

The eighth is fixed by the table alone, and chosen for what it covers: the first case, then cases
with a value that no other has, then cases that lie evenly. Two histories of one tree run the same.
"""

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

PARTS = 8
WHOLE = os.environ.get("ADAPTERHUB_MATRIX") == "full"
ALL = os.environ.get("ADAPTERHUB_TESTS") == "all" or WHOLE
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it, modulo one, lie evenly for any number of them

T = TypeVar("T")


def cases_of(cases: Iterable[T], parts: int = PARTS, nightly: int = 1) -> list[T]:
    """Return the cases that run: one of each `parts`.

    With ADAPTERHUB_TESTS=all it is one of each `nightly`, which is more than one where the cases of
    a long table repeat one path of the code, and all with ADAPTERHUB_MATRIX=full.
    """
    return part_of(cases, 1 if WHOLE else nightly if ALL else parts)


def part_of(cases: Iterable[T], parts: int = PARTS) -> list[T]:
    """Return one of each `parts` cases, in their order, whatever else runs.

    Together they have as many different values as that number of cases can have.
    """
    whole = list(cases)
    count = max(1, len(whole) // parts) if whole else 0
    evenly = sorted(range(len(whole)), key=lambda i: i * _GOLDEN % 1)
    seen: set[tuple[int, Hashable]] = set()
    adds = {i: _adds(whole[i], seen) for i in evenly}
    return [whole[i] for i in sorted(sorted(evenly, key=lambda i: not adds[i])[:count])]


def _adds(case: object, seen: set[tuple[int, Hashable]]) -> bool:
    """Return whether a case has a value, at its place, that is not seen; see all of them."""
    values = {*_values(case)}
    new = not values <= seen
    seen |= values
    return new


def _values(case: object) -> Iterator[tuple[int, Hashable]]:
    """Yield the values of a case with their places; of one that cannot be hashed its identity."""
    if hasattr(case, "marks") and hasattr(case, "values"):
        case = case.values  # of pytest.param
    for place, value in enumerate(case if isinstance(case, tuple | list) else (case,)):
        try:
            yield place, hash(value)
        except TypeError:
            yield place, id(value)


def long_table(
    names: str | Sequence[str],
    cases: Iterable[Any],
    parts: int = PARTS,
    nightly: int = 1,
    **options: Any,
) -> Callable[[Any], Any]:
    """Parametrize a test with the cases of a table that run, as `pytest.mark.parametrize`."""
    return pytest.mark.parametrize(names, cases_of(cases, parts, nightly), **options)

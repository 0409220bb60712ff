"""Methods at a size with about as many trained parameters as another one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from adapterhub.anatomy.sites import Anatomy
from adapterhub.errors import AdapterhubError
from adapterhub.methods._base import Method

LARGEST = 4096  # of an option that sizes a method
NEAR = 1.25  # two numbers of parameters are about equal up to this factor


def equal_sized(method: Method, target: int, anatomy: Anatomy) -> Method | None:
    """Return a method whose size is changed, so that it has about as many parameters.

    The number of parameters grows with the option `sized_by`, so bisection finds the two values
    around the target; the nearer one by its ratio is taken.

    Args:
        method: the method.
        target: the number of parameters to have.
        anatomy: of the backbone.

    Returns:
        None if it has about as many already, or has them at no size.
    """
    if method.sized_by is None or is_near(_count(method, anatomy), target):
        return None
    low, high = 1, LARGEST
    while low < high:
        middle = (low + high) // 2
        count = _count(_with_size(method, middle), anatomy)
        low, high = (middle + 1, high) if count is not None and count < target else (low, middle)
    sizes = [_with_size(method, size) for size in (low - 1, low) if size >= 1]
    near = [each for each in sizes if is_near(_count(each, anatomy), target)]
    return min(near, key=lambda each: _distance(each, target, anatomy), default=None)


def is_near(count: int | None, target: int) -> bool:
    """Return whether two numbers of parameters are about equal."""
    return count is not None and max(count, target) <= NEAR * min(count, target)


def count_of(methods: Sequence[Method], anatomy: Anatomy) -> int:
    """Count the trained parameters of methods, without the task head."""
    return sum(method.count(anatomy) for method in methods)


def _with_size(method: Method, size: int) -> Method:
    changed: Method = dataclasses.replace(method, **{str(method.sized_by): size})  # type: ignore[type-var]
    return changed


def _count(method: Method, anatomy: Anatomy) -> int | None:
    try:
        return method.count(anatomy)
    except AdapterhubError:
        return None


def _distance(method: Method, target: int, anatomy: Anatomy) -> float:
    return abs(math.log((_count(method, anatomy) or 1) / target))

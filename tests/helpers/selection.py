"""Which cases of a long table run: one eighth by default, all with ADAPTERHUB_TESTS=all or
ADAPTERHUB_MATRIX=full.

The eighth is chosen by the hash of the commit: the same commit runs the same cases, and in the
course of many commits a table is run whole.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

PARTS = 8
ALL = os.environ.get("ADAPTERHUB_TESTS") == "all" or os.environ.get("ADAPTERHUB_MATRIX") == "full"

T = TypeVar("T")


@cache
def turn() -> int:
    """Return the part that runs on this commit; 0 outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(found.strip()[:8], 16) % PARTS


def rotating(cases: Iterable[T], parts: int = PARTS) -> list[T]:
    """Return the cases that run now: each `parts`-th, or all with ADAPTERHUB_TESTS=all."""
    return list(cases) if ALL else in_turn(cases, parts)


def in_turn(cases: Iterable[T], parts: int = PARTS) -> list[T]:
    """Return each `parts`-th case, others on another commit, whatever else runs."""
    whole = list(cases)
    parts = max(1, min(parts, len(whole)))
    return whole[turn() % parts :: parts]


def rotate(
    names: str | Sequence[str], cases: Iterable[Any], parts: int = PARTS, **options: Any
) -> Callable[[Any], Any]:
    """Parametrize a test with the cases of a table that run now, as `pytest.mark.parametrize`."""
    return pytest.mark.parametrize(names, rotating(cases, parts), **options)

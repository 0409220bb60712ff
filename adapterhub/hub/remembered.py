"""What was read of the database, for as long as nobody has written to it.

Between two writes, all readers of a file ask the same: whose the token is, which repository, which
commit. To ask SQLite whether anybody has written takes microseconds, to ask the rest a millisecond.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from adapterhub.hub.database import Database

_MOST = 20_000
_SECONDS = 1.0  # a token may expire without a write
_Value = TypeVar("_Value")


class Remembered:
    """Values that were read, by what was asked; errors are not kept."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._state: tuple[int, float] = (-1, 0.0)
        self._values: dict[Hashable, Any] = {}

    def has(self, key: Hashable) -> bool:
        """Return whether a value is known, so that to get it does not wait for the disk."""
        return key in self._current()

    def get(self, key: Hashable, read: Callable[[], _Value]) -> _Value:
        """Return a value, and read it if it is not known or may have changed."""
        values = self._current()
        if key in values:
            known: _Value = values[key]
            return known
        value = read()
        if len(values) < _MOST:
            values[key] = value  # into the values of the state before it was read
        return value

    def _current(self) -> dict[Hashable, Any]:
        state, now = self._database.state(), time.monotonic()
        if state != self._state[0] or now - self._state[1] > _SECONDS:
            self._state, self._values = (state, now), {}
        return self._values

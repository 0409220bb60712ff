"""Times of a hub: UTC, as texts whose order is theirs."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

_SECONDS = "%Y-%m-%dT%H:%M:%SZ"


def now_text(ago: float = 0.0) -> str:
    """Return the time some seconds ago."""
    return (datetime.now(timezone.utc) - timedelta(seconds=ago)).strftime(_SECONDS)


def now_precisely() -> str:
    """Return the time to the millisecond, as the Hub writes it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"

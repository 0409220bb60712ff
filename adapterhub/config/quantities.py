"""Durations and sizes as people type them: 30m, 1.5h, 2GiB."""

from __future__ import annotations

import re

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4,
          "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}  # fmt: skip


def seconds_of(text: str) -> float | None:
    """Return the seconds of a duration such as 30m or 1.5h; None if it is none."""
    found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([smhd])\w*\s*", text)
    return float(found[1]) * _SECONDS[found[2]] if found and float(found[1]) > 0 else None


def size_in_bytes(text: str) -> int | None:
    """Return the bytes of a size such as 2GiB, 500MB or 1024; None if it is none."""
    found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([kmgt]i?|)b?\s*", text.lower())
    return int(float(found[1]) * _BYTES[found[2]]) if found and float(found[1]) > 0 else None

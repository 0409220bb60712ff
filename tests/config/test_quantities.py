"""Durations and sizes as people type them."""

from __future__ import annotations

import pytest

from adapterhub.config.yaml import seconds_of, size_in_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1024", 1024), ("1.5k", 1500),
     (" 4 mib ", 4 << 20), ("0", None), ("-1", None), ("2 GiBs", None), ("GiB", None),
     ("1e9", None), ("", None)],
)  # fmt: skip
def test_sizes(text, size):
    assert size_in_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("1.5h", 5400), ("2 minutes", 120), ("1d", 86400), ("0s", None), ("30", None),
     ("-1s", None), ("s", None)],
)  # fmt: skip
def test_durations(text, seconds):
    assert seconds_of(text) == seconds

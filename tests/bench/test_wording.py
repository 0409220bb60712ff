"""Numbers of a study as texts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adapterhub.bench.advice import (
    numbers_text,
    p_text,
    points_text,
    rate_words,
    size_words,
    time_words,
)
from adapterhub.bench.paired import PairedComparison

TIED = PairedComparison(
    baseline="lora",
    method="pfeiffer",
    score="accuracy",
    points=100,
    lower_is_better=False,
    rows=500,
    value=0.004,
    low=-0.009,
    high=0.017,
    covers_seeds=True,
    p=0.3,
    corrected=0.61,
    comparisons=7,
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "+0.4 points, 95 % interval -0.9 to +1.7, p = 0.61"),
        ({"corrected": None}, "+0.4 points, 95 % interval -0.9 to +1.7"),
        ({"low": None, "high": None, "corrected": None}, "+0.4 points"),
        (
            {"score": "loss", "points": 1, "corrected": 0.01},
            "+0.004 loss, 95 % interval -0.009 to +0.017, p = 0.01",
        ),
        ({"value": -1e-7}, "+0.0 points, 95 % interval -0.9 to +1.7, p = 0.61"),
    ],
)
def test_a_comparison_in_numbers(changes, expected):
    assert numbers_text(replace(TIED, **changes)) == expected


def test_numbers():
    assert (points_text(0.8412, 100), points_text(0.32142, 1)) == ("84.1", "0.3214")
    assert [p_text(p) for p in (0.0001, 0.0123, 0.0496, 0.0504, 1.0)] == [
        "p < 0.001", "p = 0.012", "p = 0.0496", "p = 0.0504", "p = 1"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rate", "text"),
    [(None, "-"), (1e-3, "1e-3"), (3.16e-3, "3.2e-3"), (9.99e-3, "1e-2"), (0.5, "5e-1"),
     (1.0, "1e0")],
)  # fmt: skip
def test_rate_words(rate, text):
    assert rate_words(rate) == text


def test_sizes_and_times():
    assert [size_words(n) for n in (5, 5000, 123_456, 2e6, 1.5e9, 2e11)] == [
        "5 B", "5.0 kB", "123 kB", "2.0 MB", "1.5 GB", "200 GB",
    ]  # fmt: skip
    assert [time_words(n) for n in (0.5, 59, 150, 9000)] == ["0.5 s", "59 s", "2 min", "2.5 h"]

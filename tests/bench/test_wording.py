"""Sentences about estimates and comparisons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adapterhub.bench.paired import PairedComparison
from adapterhub.bench.statistics import Estimate
from adapterhub.bench.wording import comparison_sentence, estimate_sentence, p_text, points_text

TIED = PairedComparison(
    baseline="lora",
    method="pfeiffer",
    score="accuracy",
    points=100,
    lower_is_better=False,
    rows=500,
    seeds=(3, 3),
    failed=(0, 0),
    value=0.004,
    low=-0.009,
    high=0.017,
    covers_seeds=True,
    p=0.3,
    corrected=0.61,
    comparisons=7,
)
LORA = Estimate("lora", "accuracy", 100, 500, (0.84, 0.85, 0.86), 0, 0.85, 0.01, 0.82, 0.88, True)


def test_a_tie_is_said_in_words():
    assert comparison_sentence(TIED) == (
        "pfeiffer cannot be told apart from lora (+0.4 points, 95 % interval -0.9 to +1.7, "
        "p = 0.61 after correction for 7 comparisons)."
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"low": 0.001, "high": 0.007, "p": 0.01, "corrected": 0.02, "comparisons": 2},
            "pfeiffer is better than lora (+0.4 points, 95 % interval +0.1 to +0.7, p = 0.02 after "
            "correction for 2 comparisons).",
        ),
        (
            {"value": -0.004, "corrected": 1e-9, "comparisons": 1},
            "pfeiffer is worse than lora (-0.4 points, 95 % interval -0.9 to +1.7, p < 0.001).",
        ),
        (
            {"low": 0.001},
            "pfeiffer cannot be told apart from lora (+0.4 points, 95 % interval of this pair "
            "alone +0.1 to +1.7, p = 0.61 after correction for 7 comparisons).",
        ),
        (
            {"corrected": 0.0496, "failed": (1, 1), "seeds": (2, 3), "comparisons": 1},
            "pfeiffer is better than lora in the seeds that finished (+0.4 points, 95 % interval "
            "-0.9 to +1.7, p = 0.0496); 1 of 3 seeds failed for lora; 1 of 4 seeds failed for "
            "pfeiffer.",
        ),
        (
            {"seeds": (3, 0), "failed": (0, 3), "value": None, "corrected": None},
            "It is not known how pfeiffer compares with lora: pfeiffer has no score, all 3 seeds "
            "failed.",
        ),
        (
            {"seeds": (1, 1), "covers_seeds": False, "corrected": None},
            "It is not known how pfeiffer compares with lora: lora and pfeiffer have one finished "
            "seed (+0.4 points, 95 % interval over test rows only -0.9 to +1.7).",
        ),
        (
            {"rows": 12, "low": None, "high": None, "corrected": None},
            "It is not known how pfeiffer compares with lora: 12 test rows are too few, at least "
            "20 are needed (+0.4 points).",
        ),
        (
            {"score": "loss", "points": 1, "lower_is_better": True, "corrected": 0.01},
            "pfeiffer is worse than lora (+0.004 loss, 95 % interval -0.009 to +0.017, p = 0.01 "
            "after correction for 7 comparisons).",
        ),
        (
            {"value": -0.0000001, "corrected": 1.0},
            "pfeiffer cannot be told apart from lora (+0.0 points, 95 % interval -0.9 to +1.7, "
            "p = 1 after correction for 7 comparisons).",
        ),
    ],
)  # fmt: skip
def test_comparisons_in_words(changes, expected):
    assert comparison_sentence(replace(TIED, **changes)) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "95 % interval 82.0 to 88.0; 3 seeds, sd 1.0; 500 test rows"),
        (
            {"failed": 1},
            "95 % interval 82.0 to 88.0; 3 seeds, sd 1.0; 500 test rows; 1 of 4 seeds failed",
        ),
        (
            {"scores": (0.85,), "sd": None, "covers_seeds": False},
            "95 % interval over test rows only 82.0 to 88.0; one seed, so its spread over seeds is "
            "not known; 500 test rows",
        ),
        ({"scores": (0.85,), "sd": None}, "95 % interval 82.0 to 88.0; 500 test rows"),
        (
            {"low": None, "high": None, "rows": 12, "covers_seeds": False},
            "no interval with fewer than 20 test rows; 3 seeds, sd 1.0; 12 test rows",
        ),
    ],
)  # fmt: skip
def test_estimates_in_words(changes, expected):
    assert estimate_sentence(replace(LORA, **changes)) == f"lora: accuracy 85.0 ({expected})."


def test_a_method_without_a_score_says_why():
    none = Estimate("full", "accuracy", 100, 0, (), 3)
    assert estimate_sentence(none) == "full: no score, all 3 seeds failed."
    assert estimate_sentence(replace(none, failed=0)) == "full: no score, not run."


def test_numbers_in_words():
    assert (points_text(0.8412, 100), points_text(0.32142, 1)) == ("84.1", "0.3214")
    assert [p_text(p) for p in (0.0001, 0.0123, 0.0496, 0.0504, 1.0)] == [
        "p < 0.001", "p = 0.012", "p = 0.0496", "p = 0.0504", "p = 1"
    ]  # fmt: skip

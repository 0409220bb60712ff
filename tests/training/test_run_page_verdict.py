"""What a finished run says in words."""

from __future__ import annotations

import pytest

from adapterhub.loop.report import one_class, verdict
from adapterhub.recipe.recipe import TrainOptions


def history(*accuracies: float, every: float = 1.0) -> list[dict[str, float]]:
    return [
        {"step": 10 * number, "epoch": every * number, "accuracy": accuracy}
        for number, accuracy in enumerate(accuracies, start=1)
    ]


CASES = (
    (history(0.5, 0.861, 0.8), 20, {"epochs": 3}, False, ["epoch 2 of 3 (accuracy 0.8610)"]),
    (
        history(0.5, 0.861, 0.8, 0.7, 0.7),
        20,
        {"epochs": 10, "patience": 3},
        True,
        ["epoch 2 of 10 (accuracy 0.8610)", "stopped early: no improvement in 3 evaluations"],
    ),
    (
        history(0.5, 0.6, 0.7),
        30,
        {"epochs": 3},
        False,
        [
            "epoch 3 of 3 (accuracy 0.7000)",
            "the last epoch was the best: more may help (train.epochs=6)",
        ],
    ),
    (
        history(0.5, 0.6, 0.5, every=0.25),
        20,
        {"epochs": 1, "eval_every": 10},
        False,
        ["step 20 of 30, epoch 0.50 (accuracy 0.6000)"],
    ),
    (
        history(0.6, 0.5, every=1.5),
        10,
        {"max_steps": 2000, "patience": 1},
        True,
        [
            "step 10 of 2,000, epoch 1.50 (accuracy 0.6000)",
            "stopped early: no improvement in 1 evaluation",
        ],
    ),
    (
        history(0.6),
        10,
        {"max_steps": 10},
        False,
        [
            "epoch 1, step 10 of 10 (accuracy 0.6000)",
            "the last step was the best: more may help (train.max_steps=20)",
        ],
    ),
    (history(float("nan")), None, {}, False, []),
    ([], None, {}, False, []),
)


@pytest.mark.parametrize(("records", "best", "options", "stopped", "expected"), CASES)
def test_the_best_evaluation_is_said_in_words(records, best, options, stopped, expected):
    said = verdict(records, best, TrainOptions(**options), "accuracy", stopped_early=stopped)
    assert said == expected
    assert all(len(line) <= 67 for line in said)  # 80 columns, less the name of the fact


def test_one_class_for_every_row_is_said_with_what_may_help():
    assert one_class(None) == []
    said = one_class("x" * 500)
    assert "predicted as 'xxx" in said[0]
    assert "class_weights=balanced" in said[1]
    assert all(len(line) <= 67 for line in said)

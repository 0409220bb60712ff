"""Dropout in a shared pass draws for the rows of each run what it draws for them alone."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from adapterhub.training.own_draws import OwnRows, RandomNumbers, drawing_modules, own_draws

CPU = torch.device("cpu")


def seeded(seed: int) -> RandomNumbers:
    torch.manual_seed(seed)
    return RandomNumbers()


class Both(nn.Module):
    """A dropout that all rows pass through, beside a linear module."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x)


def test_a_run_draws_what_it_draws_without_others() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    run = RandomNumbers()
    expected = [drawn(), drawn()]
    found = []
    for _ in range(2):
        with run.turn():
            found.append(drawn())
        drawn()  # of another run
    assert found == expected


def test_dropout_draws_for_the_rows_of_each_run() -> None:
    module, x = Both().train(), torch.ones(10, 4)
    expected = []
    for seed, rows in ((1, x[:4]), (2, x[4:])):
        torch.manual_seed(seed)
        expected += [module(rows), module(rows)]
    runs = [OwnRows(2, seeded(1), []), OwnRows(3, seeded(2), [])]  # each row of them twice
    torch.manual_seed(9)
    before = torch.get_rng_state()
    with own_draws(module.modules(), runs, CPU):
        first, second = module(x), module(x)
    assert torch.equal(first, torch.cat([expected[0], expected[2]]))
    assert torch.equal(second, torch.cat([expected[1], expected[3]]))
    assert torch.equal(torch.get_rng_state(), before)
    assert "forward" not in vars(module.dropout)


def test_modules_of_a_run_draw_its_numbers() -> None:
    module, x = Both().train(), torch.ones(4, 4)
    torch.manual_seed(1)
    expected = module(x)
    with own_draws([], [OwnRows(4, seeded(1), drawing_modules([module]))], CPU):
        found = module(x)
    assert torch.equal(found, expected)


def test_modules_without_dropout_are_left_as_they_are() -> None:
    module = Both()
    module.dropout.p = 0.0
    assert drawing_modules([module, module.linear]) == []
    still = Both().eval()
    with own_draws(still.modules(), [OwnRows(4, seeded(1), [])], CPU):
        assert "forward" not in vars(still.dropout)


def test_a_state_can_be_restored() -> None:
    run = seeded(1)
    before = run.copy()
    first = run.draw(CPU, torch.rand, 3)
    assert not torch.equal(run.draw(CPU, torch.rand, 3), first)
    run.state = before
    assert torch.equal(run.draw(CPU, torch.rand, 3), first)

"""Tensors are the same if they differ by rounding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from adapterhub.backbones.compare import TOLERANCE, coarsest_dtype, same

INFINITE = float("inf")


def one(*values):
    return {"x": torch.tensor(values)}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_tolerance_is_that_of_the_dtype_relative_to_the_largest_value(dtype):
    tolerance = TOLERANCE[dtype]
    assert same(one(0.0, 100.0), one(99 * tolerance, 100.0), dtype)
    compared = same(one(0.0, 100.0), one(101 * tolerance, 100.0), dtype)
    assert not compared
    (problem,) = compared.problems
    assert problem.startswith("x: max |difference| ")
    assert compared.tolerances["x"] == pytest.approx(100 * tolerance)


EMPTY, LARGE = torch.zeros(0, 3), torch.ones(3)
ZERO, ALMOST = torch.zeros(2), torch.full((2,), 5e-8)


@pytest.mark.parametrize(
    ("expected", "found", "tolerance", "is_same"),
    [
        (one(1.0), one(1.4), 0.5, True),
        (one(1.0), one(1.6), 0.5, False),
        (one(1.0), one(1e9), math.inf, True),
        # Not a number, infinite, another shape, none, missing.
        (one(1.0, 2.0), one(1.0, math.nan), torch.bfloat16, False),
        (one(1.0, 2.0), one(1.0, INFINITE), torch.bfloat16, False),
        (one(1.0, 2.0), one(1.0), torch.bfloat16, False),
        (one(1.0, 2.0), {"x": None}, torch.bfloat16, False),
        (one(1.0, 2.0), {}, torch.bfloat16, False),
        # What is not finite in both.
        (one(1.0, -INFINITE), one(1.0, -INFINITE), torch.float32, True),
        (one(1.0, math.nan), one(1.0, math.nan), 0.5, False),
        (one(1.0, math.nan), one(1.0, math.nan), math.inf, False),
        ({"x": None}, {"x": None}, torch.float32, True),
        ({"x": EMPTY}, {"x": EMPTY}, torch.float32, True),
        # A tensor that is almost zero has the rounding errors of the others.
        ({"x": ZERO}, {"x": ALMOST}, torch.float32, False),
        ({"x": ZERO, "y": LARGE}, {"x": ALMOST, "y": LARGE}, torch.float32, True),
    ],
)
def test_outputs_that_are_the_same(expected, found, tolerance, is_same):
    assert bool(same(expected, found, tolerance)) == is_same


def test_the_coarsest_dtype_of_a_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    assert coarsest_dtype(model) == torch.bfloat16
    assert coarsest_dtype(model[0]) == torch.float32
    assert coarsest_dtype(nn.ReLU()) == torch.float32

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


def test_a_tolerance_may_be_given():
    assert same(one(1.0), one(1.4), 0.5)
    assert not same(one(1.0), one(1.6), 0.5)
    assert same(one(1.0), one(1e9), math.inf)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (one(1.0, math.nan), "not a number"),
        (one(1.0, INFINITE), "infinite"),
        (one(1.0), "another shape"),
        ({"x": None}, "none"),
        ({}, "missing"),
    ],
)
def test_what_cannot_be_compared_differs(found, reason):
    assert not same(one(1.0, 2.0), found, torch.bfloat16), reason


def test_what_is_not_finite_in_both():
    assert same(one(1.0, -INFINITE), one(1.0, -INFINITE), torch.float32)
    assert not same(one(1.0, math.nan), one(1.0, math.nan), 0.5)
    assert not same(one(1.0, math.nan), one(1.0, math.nan), math.inf)
    assert same({"x": None}, {"x": None}, torch.float32)
    assert same({"x": torch.zeros(0, 3)}, {"x": torch.zeros(0, 3)}, torch.float32)


def test_a_tensor_that_is_almost_zero_has_the_rounding_errors_of_the_others():
    large = torch.ones(3)
    expected, found = torch.zeros(2), torch.full((2,), 5e-8)
    assert not same({"x": expected}, {"x": found}, torch.float32)
    assert same({"x": expected, "y": large}, {"x": found, "y": large}, torch.float32)


def test_the_coarsest_dtype_of_a_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    assert coarsest_dtype(model) == torch.bfloat16
    assert coarsest_dtype(model[0]) == torch.float32
    assert coarsest_dtype(nn.ReLU()) == torch.float32

"""Axes: round ticks within the ends, and places that follow the values."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.pages.svg import Axes, Axis, limits

value = st.floats(-1e30, 1e30, allow_subnormal=False)


@pytest.mark.parametrize(
    ("ends", "labels"),
    [
        ((0.0, 1.0), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ((0.0, 0.00105), ["0.00000", "0.00025", "0.00050", "0.00075", "0.00100"]),
        ((-3.0, 12.0), ["0", "5", "10"]),
        ((0.0, 3e9), ["0", "1e+09", "2e+09", "3e+09"]),
    ],
)
def test_ticks_are_round_numbers(ends, labels):
    assert [label for _, label in Axis(*ends, 0.0, 100.0).ticks()] == labels


def test_whole_ticks_of_few_steps():
    assert [t for _, t in Axis(0.9, 3.1, 0.0, 1.0, whole=True).ticks()] == ["1", "2", "3"]


def test_logarithmic_ticks_are_powers_of_ten():
    axis = Axis(0.5, 2e4, 0.0, 1.0, log=True)
    assert [label for _, label in axis.ticks()] == ["1", "10", "100", "1000", "10000"]
    assert axis.place(100) == pytest.approx(2.301 / 4.602, abs=1e-3)


@given(st.lists(value))
def test_every_axis_has_ticks_within_its_ends(values):
    low, high = limits(values)
    axis = Axis(low, high, 0.0, 100.0)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 7
    assert all(low - (high - low) / 100 <= tick <= high + (high - low) / 100 for tick, _ in ticks)
    assert all(0 <= axis.place(v) <= 100 and math.isfinite(axis.place(v)) for v in values)


def test_a_chart_has_what_was_added():
    axes = Axes((0.0, 1.0), (0.0, 1.0), legend=[("a & b", "first"), ("x" * 45, "second")])
    axes.line([(0, 0), (1, 1)], "first", dashed=True)
    axes.dots([(0.5, 0.5)], "second", hollow=True)
    axes.bars([(0.0, 0.5, 2.0)], "grid")
    tree = ElementTree.fromstring(axes.svg("across", "up"))
    assert {"a & b", "across", "up"} <= {*tree.itertext()}
    (line,) = re.findall(r'points="([^"]+)"', axes.svg("x"))
    assert line == f"47.0,138.0 291.0,{axes.y.end:.1f}"
    assert axes.y.end == 32  # two lines of legend: the second name does not fit the first

"""Charts: valid SVG, the same bytes each time, and the page's colours."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest
from run_folders import ROWS

from adapterhub.pages.figures import (
    histogram_chart,
    line_chart,
    reliability_chart,
    scatter_chart,
)
from adapterhub.pages.statistics import calibration
from adapterhub.pages.svg import COLOURS

POINTS = [(i, 1 / i if i != 3 else None) for i in range(1, 6)]
CHARTS = {
    "line": lambda: line_chart({"loss": POINTS}, "step", best=4),
    "lines": lambda: line_chart({"a": POINTS, "b": POINTS}, "step", span=3.0, zero=True),
    "one point": lambda: line_chart({"a": POINTS[:1]}, "step", best=1),
    "no value": lambda: line_chart({"a": [(1, None)]}, "step", log=True),
    "logarithmic": lambda: line_chart({"a": [(1, 1e5), (2, 10.0), (3, 1.0)]}, "step", log=True),
    "many": lambda: line_chart({"a": [(i, i % 7) for i in range(100_000)]}, "step"),
    "reliability": lambda: reliability_chart(calibration(ROWS["classes"])[0]),
    "scatter": lambda: scatter_chart([1.0, 2.0], [2.0, 2.0]),
    "many dots": lambda: scatter_chart([float(i) for i in range(9000)], [1.0] * 9000),
    "histogram": lambda: histogram_chart([1.0, 2.0, 2.0], "x", centre=0.0),
    "equal values": lambda: histogram_chart([1.0] * 5, "x"),
    "almost equal": lambda: histogram_chart([0.6931471, 0.6931471000000001], "x"),
    "huge values": lambda: histogram_chart([1e308], "x"),
}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_small_themed_and_the_same_each_time(name):
    svg = CHARTS[name]()
    ElementTree.fromstring(svg)
    assert svg == CHARTS[name]()
    assert len(svg) < 70_000
    assert "var(--ink)" in svg or "var(--muted)" in svg
    assert set(re.findall(r"var\(--(\w+)\)", svg)) <= {*COLOURS}
    assert "nan" not in svg
    assert "inf" not in svg
    assert "$" not in svg
    assert "width=" not in svg.split(">", 1)[0]


def test_names_are_text_and_not_markup_or_formulas():
    name = '</svg><script>alert(1)</script>$\\frac{1}{2$ "&'
    svg = line_chart({name: POINTS, "b": POINTS}, name)
    tree = ElementTree.fromstring(svg)
    assert "<script" not in svg
    assert name[:30] in "".join(tree.itertext())
    assert name in "".join(tree.itertext())

"""Names in charts: beside their lines, apart from each other."""

from __future__ import annotations

import pytest

from adapterhub.pages.direct_labels import (
    label_ends,
    room_for,
    short_name,
    spread_apart,
)
from adapterhub.pages.figures import SERIES, svg_chart


@pytest.mark.parametrize(
    ("values", "placed"),
    [([], []), ([5], [5]), ([2, 8], [2, 8]), ([5, 5], [5, 7]), ([9, 10, 10], [6, 8, 10]),
     ([0, -5], [2, 0])],
)  # fmt: skip
def test_values_are_moved_apart_within_the_ends(values, placed):
    assert spread_apart(values, 2, 0, 10) == placed


def test_too_many_values_share_the_place():
    placed = spread_apart([5.0] * 11, 2, 0, 10)
    assert sorted(placed) == pytest.approx([float(n) for n in range(11)])


def test_ends_are_named_in_their_colour():
    shown = []

    def draw(axes):
        axes.set(xlim=(0, 1), ylim=(0, 1))
        label_ends(axes, {"a": (1, 0.5), "b": (1, 0.5)}, SERIES[:2])
        shown.extend((text.get_text(), text.get_color()) for text in axes.texts)

    svg_chart(draw)
    assert shown == [("a", SERIES[0]), ("b", SERIES[1])]


def test_names_are_where_their_lines_end_though_the_axes_scale_themselves():
    def draw(axes):
        axes.plot([0, 1, 2], [0.0, 100.0, 60.0])
        label_ends(axes, {"a": (2, 60.0)}, SERIES[:1])
        axes.figure.canvas.draw()
        (text,) = axes.texts
        assert text.xy[1] == pytest.approx(axes.transData.transform((2, 60.0))[1])

    svg_chart(draw)


def test_room_for_names():
    assert room_for([], 4.6) == 0.95
    assert room_for(["x" * 50], 4.6) < room_for(["x" * 5], 4.6) < 0.95


def test_long_names_are_cut():
    assert short_name("x" * 50) == "x" * 20 + "..."

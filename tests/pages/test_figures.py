"""Charts and sections of a page: valid SVG of the page's colours, and what each kind has."""

import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest

from adapterhub.pages import figures
from adapterhub.pages.figures import histogram_chart, line_chart, prediction_sections, scatter_chart
from adapterhub.pages.row_scores import KINDS, calibration
from tests.kit.runs import ROWS, predictions

POINTS = [(i, 1 / i if i != 3 else None) for i in range(1, 6)]
CHARTS = {
    "line": lambda: line_chart({"loss": POINTS}, "step", best=4),
    "lines": lambda: line_chart({"a": POINTS, "b": POINTS}, "step", span=3.0, zero=True),
    "one point": lambda: line_chart({"a": POINTS[:1]}, "step", best=1),
    "no value": lambda: line_chart({"a": [(1, None)]}, "step", log=True),
    "logarithmic": lambda: line_chart({"a": [(1, 1e5), (2, 10.0), (3, 1.0)]}, "step", log=True),
    "many": lambda: line_chart({"a": [(i, i % 7) for i in range(100_000)]}, "step"),
    "reliability": lambda: figures.reliability_chart(calibration(ROWS["classes"])[0]),
    "scatter": lambda: scatter_chart([1.0, 2.0], [2.0, 2.0]),
    "many dots": lambda: scatter_chart([float(i) for i in range(9000)], [1.0] * 9000),
    "histogram": lambda: histogram_chart([1.0, 2.0, 2.0], "x", centre=0.0),
    "equal values": lambda: histogram_chart([1.0] * 5, "x"),
    "almost equal": lambda: histogram_chart([0.6931471, 0.6931471000000001], "x"),
    "huge values": lambda: histogram_chart([1e308], "x"),
}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_small_themed_and_the_same_each_time(name):
    """And drawing changes no settings."""
    before = dict(matplotlib.rcParams)
    svg = CHARTS[name]()
    ElementTree.fromstring(svg)
    assert svg == CHARTS[name]()
    assert dict(matplotlib.rcParams) == before
    assert len(svg) < 70_000
    assert "var(--ink)" in svg or "var(--muted)" in svg
    assert not any(colour in svg for colour in figures.COLOURS)
    assert "<metadata" not in svg
    assert "$" not in svg
    assert "width=" not in svg.split(">", 1)[0]


def test_names_are_text_and_not_markup_or_formulas():
    name = '</svg><script>alert(1)</script>$\\frac{1}{2$ "&'
    svg = line_chart({name: POINTS, "b": POINTS}, name)
    tree = ElementTree.fromstring(svg)
    assert "<script" not in svg
    assert name[:30] in "".join(tree.itertext())
    assert name in "".join(tree.itertext())


@pytest.mark.parametrize(
    ("values", "placed"),
    [([], []), ([5], [5]), ([2, 8], [2, 8]), ([5, 5], [5, 7]), ([9, 10, 10], [6, 8, 10]),
     ([0, -5], [2, 0]), ([5.0] * 11, [float(n) for n in range(11)])],
)  # fmt: skip
def test_values_are_moved_apart_within_the_ends(values, placed):
    assert sorted(figures.spread_apart(values, 2, 0, 10)) == pytest.approx(sorted(placed))


def test_names_are_where_their_lines_end_though_the_axes_scale_themselves():
    def draw(axes):
        axes.plot([0, 1, 2], [0.0, 100.0, 60.0])
        figures.label_ends(axes, {"a": (2, 60.0)}, figures.SERIES[:1])
        axes.figure.canvas.draw()
        (text,) = axes.texts
        assert text.xy[1] == pytest.approx(axes.transData.transform((2, 60.0))[1])

    figures.svg_chart(draw)


def test_long_names_have_more_room_and_are_cut():
    assert (
        figures.room_for(["x" * 50], 4.6)
        < figures.room_for(["x" * 5], 4.6)
        < figures.room_for([], 4.6)
        == 0.95
    )
    assert figures.short_name("x" * 50) == "x" * 20 + "..."


SECTIONS = {
    "sets": ["scores", "worst"],
    "classes": ["confusion", "scores", "calibration", "worst"],
    "choices": ["calibration", "worst"],
    "numbers": ["residuals", "worst"],
    "spans": ["scores", "worst"],
    "texts": ["quality", "worst"],
    "losses": ["quality", "worst"],
    "images": ["quality", "images"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_its_sections(kind):
    sections = prediction_sections(predictions(kind))
    assert [section.id for section in sections] == SECTIONS[kind]
    assert sections[-1].examples


def test_the_most_confident_mistake_is_first():
    rows = [
        {"label": "a", "prediction": "b" if i % 2 else "a", "score": i / 100} for i in range(100)
    ]
    worst = prediction_sections(predictions("classes", rows))[-1]
    assert len(worst.examples) == figures.WORST
    assert worst.examples[0].facts[-1][1] == "0.990"
    assert worst.note.startswith("50 of 100 examples are wrong")
    right = [{"label": "a", "prediction": "a", "score": 1.0}]
    none = prediction_sections(predictions("classes", right))[-1]
    assert none.note == "There are none in 1 examples."
    assert prediction_sections(predictions("losses", [{"loss": 0.0, "tokens": 0}])) == []


def test_many_classes_have_a_list_in_place_of_a_matrix():
    rows = [
        {"label": f"c{i % 60}", "prediction": f"c{(i + i // 60) % 60}", "score": 0.5}
        for i in range(120)
    ]
    confusion, scores, *_ = prediction_sections(predictions("classes", rows))
    assert confusion.matrix is None
    assert confusion.table is not None
    assert confusion.table.rows[0][0] == "c0 → c1"
    assert "40 of 62" in scores.note


def test_entities_are_marked_in_their_text():
    spans = [["loc", 6, 9], ["per", 0, 2], ["per", 1, 3]]
    assert figures.marked_text("Al in Rome", spans, [["per", 0, 2]]) == [
        ("Al", "per", True), (" in ", "", False), ("Rom", "loc", False), ("e", "", False)
    ]  # fmt: skip

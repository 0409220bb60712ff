"""Pages with tables: without a script they are complete, and only their own script runs."""

from __future__ import annotations

from adapterhub.files.shown_table import ShownTable, TableCell
from adapterhub.pages.framed import ChartGroup, framed_page


def test_a_table_is_in_the_page_with_its_numbers():
    rows = [("a<b", TableCell("1,000", 1000.0), TableCell("-"))]
    table = ShownTable(("name", "n", "m"), rows, meanings=("", "a number", ""), taken=[0])
    page = framed_page("runs.html", name="<x>", subtitle="", table=table, note="", groups=[],
                       facts=[("a", "b")])  # fmt: skip
    assert '<th scope="row"><bdi>a&lt;b</bdi></th><td data-value="1000.0">' in page
    assert '<td data-value=""><bdi>-</bdi></td>' in page
    assert "&lt;x&gt;" in page
    assert page.count("<script>") == 1
    assert "<dt><bdi>a</bdi></dt>" in page


def test_a_group_without_charts_is_only_a_title():
    group = ChartGroup("Speed", "a note", [])
    page = framed_page("runs.html", name="x", subtitle="", table=ShownTable([], []), note="",
                       groups=[group], facts=[])  # fmt: skip
    assert "Speed" in page
    assert "<figure>" not in page

"""A table that is shown, in Markdown and in HTML; tests/cli/test_format.py prints it."""

from __future__ import annotations

from markdown_it import MarkdownIt

from adapterhub.files.shown_table import ShownTable, TableCell

TABLE = ShownTable(
    ("run", "score"),
    [("a_1 | <b>", TableCell("-0.5", -0.5)), ("b", "\u202e1")],
    numbers=True,
    meanings=("", 'a "number"'),
    taken=[1],
)


def test_markdown_has_a_header_and_rules():
    plain = ShownTable(("a", "b"), [("c", "d")])
    assert plain.markdown() == "| a | b |\n| --- | --- |\n| c | d |"
    assert "| --- | ---: |" in TABLE.markdown()


def test_markdown_is_rendered_as_the_texts():
    html = MarkdownIt("gfm-like", {"linkify": False}).render(TABLE.markdown())
    assert "<td>a_1 | &lt;b&gt;</td>" in html
    assert ">-0.5</td>" in html
    assert "\u202e" not in html


def test_a_cell_may_have_a_markdown_of_its_own():
    table = ShownTable(("a",), [(TableCell("x", markdown="[x](https://example.org)"),)])
    assert table.markdown().endswith("| [x](https://example.org) |")
    assert table.texts() == [["x"]]


def test_html_is_escaped():
    html = TABLE.html()
    assert '<th scope="row"><bdi>a_1 | &lt;b&gt;</bdi></th><td><bdi>-0.5</bdi></td>' in html
    assert '<th scope="col" title="a &quot;number&quot;"><bdi>score</bdi></th>' in html
    assert "\u202e" not in html
    assert html.count("<tr class=taken>") == 1


def test_a_sortable_table_has_the_numbers():
    html = TABLE.html(sortable=True)
    assert '<td data-value="-0.5">' in html
    assert '<td data-value="">' in html


def test_plain_text_has_columns_and_one_line_for_each_row():
    table = ShownTable(["name", "n"], [("a\nb", "1"), ("long name", "22")], title="numbers")
    assert table.text() == "numbers\nname       n\na\\nb       1\nlong name  22"

"""A table that is shown, and Markdown around texts of others.

tests/cli/test_format.py prints tables, tests/attacks/test_hostile_cards.py attacks whole cards.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from adapterhub.files.shown_table import ShownTable, TableCell, code_block, literal

TABLE = ShownTable(
    ("run", "score"),
    [("a_1 | <b>", TableCell("-0.5", -0.5)), ("b", "\u202e1")],
    numbers=True,
    meanings=("", 'a "number"'),
    taken=[1],
)


def test_markdown_has_rules_and_is_rendered_as_the_texts():
    plain = ShownTable(("a", "b"), [("c", "d")])
    assert plain.markdown() == "| a | b |\n| --- | --- |\n| c | d |"
    assert "| --- | ---: |" in TABLE.markdown()
    html = MarkdownIt("gfm-like", {"linkify": False}).render(TABLE.markdown())
    assert "<td>a_1 | &lt;b&gt;</td>" in html
    assert ">-0.5</td>" in html
    assert "\u202e" not in html
    table = ShownTable(("a",), [(TableCell("x", markdown="[x](https://example.org)"),)])
    assert table.markdown().endswith("| [x](https://example.org) |")
    assert table.texts() == [["x"]]


def test_html_is_escaped_and_has_the_numbers_if_it_is_sortable():
    html = TABLE.html()
    assert '<th scope="row"><bdi>a_1 | &lt;b&gt;</bdi></th><td><bdi>-0.5</bdi></td>' in html
    assert '<th scope="col" title="a &quot;number&quot;"><bdi>score</bdi></th>' in html
    assert "\u202e" not in html
    assert html.count("<tr class=taken>") == 1
    for value in ("-0.5", ""):
        assert f'<td data-value="{value}">' in TABLE.html(sortable=True)


def test_plain_text_has_columns_and_one_line_for_each_row():
    table = ShownTable(["name", "n"], [("a\nb", "1"), ("long name", "22")], title="numbers")
    assert table.text() == "numbers\nname       n\na\\nb       1\nlong name  22"


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("snake_case, 10 km/h (a+b)", "snake_case, 10 km/h (a+b)"),
        ("<b>", r"\<b\>"), ("a | b", r"a \| b"), ("# x", r"\# x"), ("1. x", r"1\. x"),
        ("_x_ `y`", r"\_x\_ \`y\`"), ("a\n\n b", "a b"), ("\x1b[2J", r"\\u001b\[2J"),
    ],
)  # fmt: skip
def test_markup_is_escaped_and_plain_text_is_not(text, escaped):
    assert literal(text) == escaped


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30))
def test_a_literal_is_rendered_as_its_text(text):
    html = MarkdownIt("gfm-like", {"linkify": False}).render(literal(text) or "x")
    shown = html.removeprefix("<p>").removesuffix("</p>\n")
    for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        shown = shown.replace(entity, character)
    assert shown == (" ".join(text.split()) or "x")


def test_a_fence_is_longer_than_what_it_encloses():
    assert code_block("python", ["a", "````"]) == "`````python\na\n````\n`````"
    assert code_block("yaml", ["a"]) == "```yaml\na\n```"

"""Markdown around texts of others; tests/attacks/test_hostile_cards.py attacks whole cards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from adapterhub.files.shown_table import code_block, literal


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

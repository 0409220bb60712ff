r"""Markdown around texts of others: whatever they contain, they stay text.

CommonMark, https://spec.commonmark.org/0.31.2/: a backslash makes any ASCII punctuation literal
(section 2.4), and a fence ends a code block only if it is as long as the one that opened it (4.5).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from adapterhub.errors import one_line

_MOST = 4000  # characters of one value: twice the longest description
# Inline markup, HTML and entities; underscores inside a word are literal anyway (section 6.2).
_INLINE = re.compile(r"[\\`*\[\]<>|~&]|(?<![^\W_])_|_(?![^\W_])")
# What begins a heading, list, quote or rule, or underlines a heading, at the start of a line.
_START = re.compile(r"[#+=:-]|\d+(?=[.)])")


def literal(text: str) -> str:
    """Escape a text of others for a paragraph, a heading or a table cell: one line, no markup."""
    line = _INLINE.sub(r"\\\g<0>", one_line(" ".join(text.split()), _MOST).replace("\x00", ""))
    if start := _START.match(line):
        end = start.end() if start.group().isdigit() else 0
        line = f"{line[:end]}\\{line[end:]}"
    return line


def code_block(language: str, lines: Iterable[str]) -> str:
    """Write a code block whose fence is longer than any run of backticks in it."""
    text = "\n".join(lines)
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"

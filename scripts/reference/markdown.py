"""Texts of the code as Markdown: of help texts, docstrings and options."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

_CODE = re.compile(r"(`[^`\n]+(?:\n[^`\n]+)?`)")
_PAGE = re.compile(r"docs/([\w/-]+\.md)")
_SPECIAL = re.compile(r"([\\*_<\[\]{}#])")


def prose(text: str, page: str = "") -> str:
    """Return plain text as Markdown that shows it; what is in backticks is code.

    `docs/guides/data.md` becomes a link from `page`, a path under docs/.
    """
    parts = _CODE.split(text)
    parts[::2] = [_SPECIAL.sub(r"\\\1", part) for part in parts[::2]]
    up = "../" * (len(PurePosixPath(page).parts) - 1)
    return _PAGE.sub(rf"[\1]({up}\1)", "".join(parts))


def code(text: str) -> str:
    """Return text as inline code, also with backticks in it."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def codes(texts: Iterable[str]) -> str:
    """Return texts as inline code, with commas between them."""
    return ", ".join(map(code, texts))


def sentence(text: str) -> str:
    """Return a text with a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def entry(term: str, anchor: str, *lines: str) -> str:
    """Return an entry of a list of definitions; its term has an anchor and is a link to itself."""
    return f"[{code(term)}](#{anchor}) {{: #{anchor} }}\n\n:   {'<br>'.join(lines)}\n"

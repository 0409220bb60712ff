"""Docstrings of modules as Markdown: equations stay as they are, in blocks of their own."""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import dataclass

COST = "Parameters: "


@dataclass(frozen=True)
class Docstring:
    """The parts of a docstring: its first paragraph, the text, the cost and the source."""

    title: str
    body: tuple[str, ...]
    cost: str
    source: str

    def markdown(self) -> str:
        """Return the text, without the cost and the source."""
        return "\n\n".join(map(block, self.body))


def parsed(text: str) -> Docstring:
    """Split a docstring into its parts.

    The paragraph that begins with "Parameters:" is the cost; the last one with an address is the
    source.
    """
    title, *rest = paragraphs(text)
    costs = [each for each in rest if each.startswith(COST)]
    sources = [each for each in rest if "https://" in each]
    source = sources[-1] if sources and sources[-1] == rest[-1] else ""
    body = tuple(each for each in rest if each not in costs and each != source)
    return Docstring(title, body, " ".join(costs).removeprefix(COST), source)


def paragraphs(text: str) -> list[str]:
    """Split a docstring at blank lines; indented blocks that follow each other are one."""
    found: list[str] = []
    for each in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if found and is_shown(each) and is_shown(found[-1]):
            found[-1] += "\n\n" + each
        else:
            found.append(each)
    return found


def is_shown(paragraph: str) -> bool:
    """Return whether a paragraph is an equation or a table, which is indented."""
    return paragraph.startswith("    ")


def block(paragraph: str) -> str:
    """Return a paragraph as Markdown."""
    if is_shown(paragraph):
        lines = textwrap.dedent(paragraph).rstrip().splitlines()
        return "```text\n" + "\n".join(map(_narrow, lines)) + "\n```"
    return linked(" ".join(paragraph.split()))


def _narrow(line: str) -> str:
    """Put the number of an equation next to it, and each symbol on a line: a phone is narrow."""
    line = re.sub(r" {5,}(\([^()]*\))$", r"    \1", line)
    symbols = re.split(r" {4,}", line)
    return "\n".join(symbols) if all(re.match(r"[^(]*?: ", each) for each in symbols) else line


def linked(text: str) -> str:
    """Return a text whose addresses are links."""
    text = re.sub(r"(?<![`<])\bhttps://\S+?(?=[.,;)]*(\s|$))", r"<\g<0>>", text)
    return re.sub(r"(?<=[ (])<(?!https)", "&lt;", text)

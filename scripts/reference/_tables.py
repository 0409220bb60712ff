"""Tables in Markdown, for the generated pages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence

from adapterhub.config.options import OptionDoc, to_dict
from adapterhub.config.yaml import inline_yaml


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells are Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def options_table(options: Iterable[OptionDoc], prefix: str = "") -> str:
    """Return a table of the options of a dataclass: name; help text, values and default.

    It has two columns, so that it fits a phone.

    Args:
        options: the options, as `adapterhub.config.options.options_of` returns them.
        prefix: what stands in front of each name, such as `train.`.
    """
    rows = [
        (
            f"`{prefix}{option.name}`",
            f"{escaped(option.help)}<br>{values(option.type)}, {default(option)}",
        )
        for option in options
    ]
    return table(("option", "meaning, values and default"), rows)


def values(type_text: str) -> str:
    """Return the values that an option takes: `int` or `null`."""
    names = [f"`{name}`" for name in type_text.split(" | ")]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def default(option: OptionDoc) -> str:
    """Return the default of an option as YAML, or say that it is required."""
    if option.default is dataclasses.MISSING:
        return "required"
    plain = to_dict({"default": option.default})["default"]
    text = inline_yaml(plain)
    return f"default `{json.dumps(plain) if chr(10) in text else text}`"


def escaped(text: str) -> str:
    """Return a text whose characters have no meaning in Markdown or in a table."""
    for character in "\\|*_`<[":
        text = text.replace(character, f"\\{character}" if character != "<" else "&lt;")
    return text

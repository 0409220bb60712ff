"""YAML with a comment above each option: its help text, the values it takes and its default."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Mapping

from adapterhub.config.options import OptionDoc, options_of, to_dict
from adapterhub.config.yaml import inline_yaml

WIDTH = 80
_INDENT = "  "


def commented_options(
    cls: type, values: Mapping[str, object], required: Iterable[str] = ()
) -> Iterator[str]:
    """Yield the lines of the options of a dataclass; options that are dataclasses are left out.

    Options without a value are left out; `required` have no usable default.
    """
    for option in options_of(cls):
        if option.name in values and not dataclasses.is_dataclass(option.default):
            yield from comment(option.help)
            yield from comment(_INDENT + values_text(option, option.name in required))
            yield f"{option.name}: {inline_yaml(values[option.name])}"


def comment(text: str) -> list[str]:
    """Write a text as comment lines that fit 80 columns below two levels."""
    spaces = text[: len(text) - len(text.lstrip())]
    prefix = f"# {spaces}"
    width = WIDTH - 2 * len(_INDENT)
    return textwrap.wrap(
        text.strip(), width, initial_indent=prefix, subsequent_indent=prefix, break_on_hyphens=False
    )


def values_text(option: OptionDoc, required: bool = False) -> str:
    """Describe the values of an option and its default: `int | null, default null`."""
    if required or option.default is dataclasses.MISSING:
        return f"{option.type}, required"
    return f"{option.type}, default {inline_yaml(to_dict({'default': option.default})['default'])}"


def below(name: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a mapping under a name; without lines, an empty one."""
    inner = list(lines)
    yield f"{name}:" if inner else f"{name}: {{}}"
    yield from (f"{_INDENT}{line}" for line in inner)

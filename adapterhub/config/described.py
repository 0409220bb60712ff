"""Options written for people and editors: commented YAML, and JSON schemas."""

from __future__ import annotations

import dataclasses
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Union

from adapterhub.config.options import OptionDoc, hints_of, options_of, to_dict
from adapterhub.config.yaml import inline_yaml

WIDTH = 80
_INDENT = "  "
_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


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


_WORDS = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}
_OPEN = re.compile(r" \((?:null|empty): (.*)\)$", re.DOTALL)  # what an option is if it is left out


def help_in_words(option: OptionDoc) -> tuple[str, str]:
    """Split a help text into what the option is, and what holds where it is left out, or ""."""
    left_out = _OPEN.search(option.help)
    return _OPEN.sub("", option.help), left_out[1] if left_out else ""


def values_in_words(option: OptionDoc, required: bool = False) -> str:
    """Describe the values and the default for a command line, without the words of YAML."""
    members = [part for part in option.type.split(" | ") if part != "null"]
    *others, last = map(_in_words, members)
    values = f"{', '.join(others)} or {last}" if others else last
    if required or option.default is dataclasses.MISSING:
        return f"{values}; required" if values else "required"
    default = to_dict({"default": option.default})["default"]
    said = (
        help_in_words(option)[1] or "none"
        if default in (None, "", [], {})
        else inline_yaml(default)
    )
    return "; ".join(filter(None, [values, f"default: {said}"]))


def _in_words(kind: str) -> str:
    if kind.startswith("list of "):
        return f"[{_in_words(kind.removeprefix('list of ')) or 'value'}, ...]"
    if kind.startswith("mapping of "):
        return f"{{name: {_in_words(kind.removeprefix('mapping of ')) or 'value'}, ...}}"
    return "" if kind == "anything" or kind.startswith("mapping") else _WORDS.get(kind, kind)


def below(name: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a mapping under a name; without lines, an empty one."""
    inner = list(lines)
    yield f"{name}:" if inner else f"{name}: {{}}"
    yield from (f"{_INDENT}{line}" for line in inner)


def json_schema(cls: type) -> dict[str, Any]:
    """Derive the JSON schema (draft 2020-12) of the data from which `from_dict` builds `cls`."""
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, "title": cls.__name__, **options_schema(cls)}


def options_schema(cls: type) -> dict[str, Any]:
    """Derive the schema of the options of a dataclass, without the dialect and a title."""
    hints = hints_of(cls)
    properties: dict[str, dict[str, Any]] = {}
    required = []
    for option in options_of(cls):
        properties[option.name] = schema = _schema(hints[option.name])
        if option.help:
            schema["description"] = option.help
        if option.default is dataclasses.MISSING:
            required.append(option.name)
        elif not dataclasses.is_dataclass(option.default):
            schema.update(to_dict({"default": option.default}))
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | ({"required": required} if required else {})


def _schema(hint: Any) -> dict[str, Any]:
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(arg) for arg in args]}
    if dataclasses.is_dataclass(hint):
        return options_schema(typing.cast(type, hint))
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _schema(args[1]) if args else True}
    if origin is tuple and args and args[-1] is not Ellipsis:
        items = [_schema(arg) for arg in args]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if origin in (tuple, list):
        return {"type": "array", "items": _schema(args[0]) if args else True}
    return {}

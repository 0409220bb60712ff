"""The call syntax of method and task specs: `lora`, `lora(rank=16)`, `lora(sites=[attn.q])`."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import yaml

from adapterhub.config.yaml import Loader, plain_scalar
from adapterhub.errors import ConfigError

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4,
          "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}  # fmt: skip


def seconds_of(text: str) -> float | None:
    """Return the seconds of a duration such as 30m or 1.5h; None for other texts."""
    found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([smhd])\w*\s*", text)
    return float(found[1]) * _SECONDS[found[2]] if found and float(found[1]) > 0 else None


def size_in_bytes(text: str) -> int | None:
    """Return the bytes of a size such as 2GiB, 500MB or 1024; None for other texts."""
    found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([kmgt]i?|)b?\s*", text.lower())
    return int(float(found[1]) * _BYTES[found[2]]) if found and float(found[1]) > 0 else None


MAX_CHARACTERS = 4000  # Python's parser needs memory proportional to the nesting depth
_CALL = re.compile(r"\s*([A-Za-z_][\w-]*)\s*(?:\((.*)\))?\s*", re.DOTALL)
_ARGUMENT = re.compile(r"\s*([A-Za-z_][\w-]*)\s*=(.*)", re.DOTALL)
_BARE = re.compile(r"[\w.*-]+(?: [\w.*-]+)*")  # attn.q, top 4, 0..3, int8-weight
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def parse_calls(text: str, kind: str, examples: str) -> list[tuple[str, dict[str, Any]]]:
    """Parse a comma-separated list of `name` or `name(option=value)`.

    Values are Python literals, bare words (`attn.q`, `top 4`), `true`, `false`, `null`, and lists
    and mappings of these as in YAML: `[attn.q, attn.v]`, `{attn.q: 4}`.

    `kind` is "method" or "task"; `examples` are valid specs, for the error.

    Returns:
        One (name, options) pair per call, in order.

    Raises:
        ConfigError: the text is not such a list.
    """
    error = spec_error(text, kind, examples)
    if len(text) > MAX_CHARACTERS:
        raise error
    return [_parse_call(item, error) for item in _split(text, error)]


def call_text(name: str, options: Mapping[str, object]) -> str:
    """Format a call that `parse_calls` reads back: lora(rank=4, sites=[attn.q]).

    Options are plain data: numbers, strings, booleans, null, lists and mappings with string keys.
    """
    arguments = ", ".join(f"{key}={_value_text(value)}" for key, value in options.items())
    return f"{name}({arguments})" if arguments else name


def spec_error(spec: object, kind: str, examples: str) -> ConfigError:
    """Build the error for an invalid spec.

    Returns:
        The error, for the caller to raise.
    """
    cut = isinstance(spec, str) and spec.count("(") > spec.count(")")  # at a comma of a YAML list
    hint = 'quotes around each: ["lora(rank=4, alpha=8)", "prefix"]' if cut else ""
    return ConfigError(f"invalid {kind} spec {repr(spec)[:200]}", expected=examples, hint=hint)


def _parse_call(text: str, error: ConfigError) -> tuple[str, dict[str, Any]]:
    call = _CALL.fullmatch(text)
    if call is None:
        raise error
    options: dict[str, Any] = {}
    arguments = _split(call[2], error) if call[2] and call[2].strip() else []
    for argument in map(_ARGUMENT.fullmatch, arguments):
        if argument is None or argument[1] in options:
            raise error
        options[argument[1]] = _parse_value(argument[2].strip(), error)
    return call[1], options


def _split(text: str, error: ConfigError) -> list[str]:
    """Split at the commas outside of brackets and quotes; a last comma is allowed."""
    commas = [-1, *_commas(text, error), len(text)]
    items = [text[a + 1 : b] for a, b in pairwise(commas)]
    if len(items) > 1 and not items[-1].strip():
        items.pop()
    return items


def _commas(text: str, error: ConfigError) -> Iterator[int]:
    closing: list[str] = []
    quote = ""
    position = 0
    while position < len(text):
        character = text[position]
        if quote:
            position += character == "\\"  # the next character is escaped
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _CLOSING:
            closing.append(_CLOSING[character])
        elif character in ")]}":
            if not closing or closing.pop() != character:
                raise error
        elif character == "," and not closing:
            yield position
        position += 1
    if quote or closing:
        raise error


def _parse_value(text: str, error: ConfigError) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as cause:
        if _BARE.fullmatch(text):
            return plain_scalar(text)
        if not text.startswith(("[", "{")):
            raise error from cause
    try:
        return yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as cause:
        raise error from cause


def _value_text(value: object) -> str:
    """Format a value, quoted only if it would otherwise be read as something else."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_value_text(k)}: {_value_text(v)}' for k, v in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value_text, value))}]"
    if isinstance(value, str):
        return value if _is_bare(value) else _quoted(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    return json.dumps(value)


def _quoted(text: str) -> str:
    """Quote a text with the escapes common to Python and YAML."""
    plain = (c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
    return f'"{"".join(plain)}"'


def _is_bare(text: str) -> bool:
    if not _BARE.fullmatch(text) or plain_scalar(text) != text or text[0] in "-*":
        return False
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return True
    return False

"""Closed JSON schemas: a strict parser, canonical bytes, and checks that compose into one table.

A check takes the path of a value and the value, and returns one line for each thing wrong with it.
The values come from strangers, so messages are short, escaped, and limited in number.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from adapterhub.config.options import is_neutral

Check = Callable[[str, object], list[str]]
MAX_DEPTH = 32
_MAX_FREE_DEPTH = 16
_MAX_FREE_NODES = 20_000
_MAX_ENTRIES = 20_000
_MAX_OFFENDERS = 50


def canonical_json(tree: Mapping[str, Any]) -> bytes:
    """`tree` as canonical JSON bytes: sorted keys, two spaces, LF, UTF-8, a newline at the end."""
    text = json.dumps(tree, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()


def parse_object(data: bytes, max_bytes: int) -> tuple[dict[str, Any], list[str]]:
    """The JSON object in `data`, and the offenders: all that Python's own parser lets pass.

    The object is empty where nothing could be read. Depth is counted before the parser recurses.
    """
    if len(data) > max_bytes:
        return {}, [f"{len(data)} bytes, more than {max_bytes}"]
    if json_depth(data) > MAX_DEPTH:
        return {}, [f"nested deeper than {MAX_DEPTH} levels"]
    offenders: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in items)
        offenders.extend(f"{show(k)}: given more than once" for k, n in counts.items() if n > 1)
        return dict(items)

    def number(text: str) -> int | float | None:
        value, whole = float(text), text.lstrip("-").isdigit()
        if not math.isfinite(value) or (whole and abs(value) >= 2**63):
            offenders.append(f"{show(text)}: not a finite number of at most 64 bits")
            return None
        return int(text) if whole else value

    hooks: dict[str, Any] = {"object_pairs_hook": pairs, "parse_constant": number}
    try:
        tree = json.loads(data.decode("utf-8"), parse_float=number, parse_int=number, **hooks)
        json.dumps(tree, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return {}, [*offenders, "a string holds a lone surrogate"]
    except ValueError as error:
        return {}, [*offenders, f"not JSON in UTF-8: {error}"]
    return (tree, offenders) if isinstance(tree, dict) else ({}, ["not a JSON object"])


def json_depth(data: bytes) -> int:
    """How deep brackets nest outside strings; it stops counting just above `MAX_DEPTH`."""
    depth, deepest, quoted = 0, 0, False
    for match in re.finditer(rb'\\.|["\[\]{}]', data, re.DOTALL):
        token = match.group()
        if token == b'"':
            quoted = not quoted
        elif not quoted and token in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif not quoted and token in b"]}":
            depth -= 1
        if deepest > MAX_DEPTH:
            break
    return deepest


def shorten(offenders: list[str]) -> list[str]:
    """The first offenders, and how many more there are."""
    more = len(offenders) - _MAX_OFFENDERS
    return [*offenders[:_MAX_OFFENDERS], f"and {more} more"] if more > 0 else offenders


def show(value: object) -> str:
    """`value` for a message: short, and without characters that steer a terminal."""
    if isinstance(value, str):
        return ascii(value[:80])
    if value is None or isinstance(value, (bool, float)):
        return str(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 2**64 else "an integer of more than 64 bits"
    return f"a {type(value).__name__}"


def text(pattern: str, what: str, *, null: bool = False) -> Check:
    """A string that matches all of `pattern`, described as `what`; or null where allowed."""
    compiled = re.compile(pattern)

    def check(path: str, value: object) -> list[str]:
        if null and value is None:
            return []
        if isinstance(value, str) and compiled.fullmatch(value):
            return surrogate_problem(path, value)
        return [f"{path}: {show(value)} is not {what}"]

    return check


def integer(low: int, high: int) -> Check:
    """A whole number from `low` to `high`; true and false are not numbers."""

    def check(path: str, value: object) -> list[str]:
        if type(value) is int and low <= value <= high:
            return []
        return [f"{path}: {show(value)} is not a whole number from {low} to {high}"]

    return check


def boolean(path: str, value: object) -> list[str]:
    """True or false."""
    return [] if isinstance(value, bool) else [f"{path}: {show(value)} is not true or false"]


def number(path: str, value: object) -> list[str]:
    """A finite number of at most 64 bits."""
    if isinstance(value, float) and math.isfinite(value):
        return []
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return []
    return [f"{path}: {show(value)} is not a finite number"]


def sequence(item: Check, low: int, high: int) -> Check:
    """A list of `low` to `high` items."""

    def check(path: str, value: object) -> list[str]:
        if not isinstance(value, (list, tuple)) or not low <= len(value) <= high:
            return [f"{path}: not a list of {low} to {high} items"]
        return [line for i, entry in enumerate(value) for line in item(f"{path}.{i}", entry)]

    return check


def mapping(key: Check, item: Check, low: int = 0, high: int = _MAX_ENTRIES) -> Check:
    """An object with free keys."""

    def check(path: str, value: object) -> list[str]:
        if not isinstance(value, dict) or not low <= len(value) <= high:
            return [f"{path}: not an object of {low} to {high} entries"]
        found = [line for name in value for line in key(path, name)]
        return found + [
            line for name, entry in value.items() for line in item(at(path, name), entry)
        ]

    return check


def record(fields: Mapping[str, Check]) -> Check:
    """An object with exactly `fields`; an unknown field passes only while it says nothing."""

    def check(path: str, value: object) -> list[str]:
        if not isinstance(value, dict):
            return [f"{path}: {show(value)} is not an object"]
        found = [f"{at(path, name)}: missing" for name in fields if name not in value]
        for name, entry in value.items():
            if name in fields:
                found += fields[name](at(path, name), entry)
            elif not is_neutral(entry):
                found.append(f"{at(path, name)}: unknown, it needs a newer adapterhub")
        return found

    return check


def free(path: str, value: object) -> list[str]:
    """Any JSON object, limited in depth and size, finite, and without paths of one machine."""
    if not isinstance(value, dict):
        return [f"{path}: {show(value)} is not an object"]
    found: list[str] = []
    queue: list[tuple[str, object, int]] = [(path, value, 1)]
    for seen, (where, entry, depth) in enumerate(queue):
        if seen >= _MAX_FREE_NODES or depth > _MAX_FREE_DEPTH:
            limits = f"{_MAX_FREE_NODES} values or {_MAX_FREE_DEPTH} levels"
            return [*found, f"{path}: more than {limits}"]
        if isinstance(entry, dict):
            found += [line for key in entry for line in _free_key(where, key)]
            queue += [(at(where, key), item, depth + 1) for key, item in entry.items()]
        elif isinstance(entry, (list, tuple)):
            queue += [(f"{where}.{i}", item, depth + 1) for i, item in enumerate(entry)]
        else:
            found += _free_leaf(where, entry)
    return found


def _free_key(path: str, key: object) -> list[str]:
    if isinstance(key, str):
        return _free_leaf(f"{path}, a key", key)
    return [f"{path}: the key {show(key)} is not a string"]


def _free_leaf(path: str, value: object) -> list[str]:
    if isinstance(value, str):
        return surrogate_problem(path, value) + path_problem(path, value)
    if value is None or isinstance(value, bool):
        return []
    return number(path, value)


def surrogate_problem(path: str, value: str) -> list[str]:
    """One line if `value` cannot be written as UTF-8."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return [f"{path}: {show(value)} holds a lone surrogate"]
    return []


# Also finds a path inside a longer text, such as a recorded command line.
_PATH = re.compile(
    r"""^/\S|^file:/|^~[\w.-]*$|^\\\\
    |(?:^|[\s='":(,;\[])(?:/[\w.+-]+/[\w.+-]|~[\w.-]*[/\\]|[A-Za-z]:[\\/]|\\\\\w)""",
    re.VERBOSE | re.IGNORECASE,
)


def path_problem(path: str, value: str) -> list[str]:
    """One line if `value` is or holds an absolute path, a home path or a Windows path."""
    if _PATH.search(value):
        return [f"{path}: {show(value)} holds an absolute path of one machine"]
    return []


def at(path: str, key: object) -> str:
    """The path of `key` inside `path`, for messages."""
    plain = isinstance(key, str) and re.fullmatch(r"[A-Za-z0-9_.-]{1,80}", key)
    name = str(key) if plain else show(key)
    return f"{path}.{name}" if path else name

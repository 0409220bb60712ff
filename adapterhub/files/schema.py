"""JSON files: a strict parser, canonical bytes, and checks of their values.

A check takes the path of a value and the value and returns one line for each problem. The values
are untrusted, so messages are short, escaped, and limited in number. Checks limit the fields of
dataclasses that `config.options.from_file` reads.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

from adapterhub.config.options import Check as Check
from adapterhub.config.options import at as at
from adapterhub.config.options import from_file, is_neutral
from adapterhub.config.options import show as show

T = TypeVar("T")

MAX_DEPTH = 32
_MAX_FREE_DEPTH = 16
_MAX_FREE_NODES = 20_000
_MAX_ENTRIES = 20_000
_MAX_OFFENDERS = 50
CRLF = (
    "its line ends are CRLF, as git writes them with core.autocrlf: write `* -text` into "
    ".gitattributes, delete the files, and type git checkout -- ."
)


def canonical_json(tree: Mapping[str, Any]) -> bytes:
    """Serialize `tree` as canonical JSON: sorted keys, two spaces, LF, UTF-8, a final newline."""
    text = json.dumps(tree, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()


def with_lf(data: bytes) -> bytes:
    """Return a text with its original line ends, before git changed them."""
    return data.replace(b"\r\n", b"\n")


def not_canonical(tree: Mapping[str, Any], data: bytes) -> str:
    """Describe the problem with the bytes of a file in canonical JSON; "" if there is none."""
    written = canonical_json(tree)
    if written == data:
        return ""
    if written == with_lf(data):
        return CRLF
    return "the bytes are not canonical: the file was edited or damaged"


def parse_object(data: bytes, max_bytes: int) -> tuple[dict[str, Any], list[str]]:
    """Parse the JSON object in `data`; return it with a list of problems.

    Also reports what Python's parser accepts: duplicate keys, non-finite numbers, integers beyond
    64 bits, lone surrogates. The object is empty if parsing failed. The depth is limited before the
    parser recurses.
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
        return {}, [*offenders, "a string contains a lone surrogate"]
    except ValueError as error:
        return {}, [*offenders, f"not JSON in UTF-8: {error}"]
    return (tree, offenders) if isinstance(tree, dict) else ({}, ["not a JSON object"])


def parse_record(cls: type[T], data: bytes, max_bytes: int) -> tuple[T | None, list[str]]:
    """Build a dataclass from the JSON object in `data`; None with a line for each problem."""
    tree, problems = parse_object(data, max_bytes)
    return (None, problems) if problems else from_file(cls, tree)


def json_depth(data: bytes) -> int:
    """Return the nesting depth of brackets outside strings; stop just above `MAX_DEPTH`."""
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
    """Truncate a list of offenders, ending it with the number of omitted ones."""
    more = len(offenders) - _MAX_OFFENDERS
    return [*offenders[:_MAX_OFFENDERS], f"and {more} more"] if more > 0 else offenders


def text(pattern: str, description: str, *, null: bool = False) -> Check:
    """Return a check for a string.

    The whole string must match `pattern`; `description` is for the message; `null` accepts null
    too.
    """
    compiled = re.compile(pattern)

    def check(path: str, value: object) -> list[str]:
        if null and value is None:
            return []
        if isinstance(value, str) and compiled.fullmatch(value):
            return surrogate_problem(path, value)
        return [f"{path}: {show(value)} is not {description}"]

    return check


def integer(low: int, high: int, *, null: bool = False) -> Check:
    """Return a check for an integer; booleans are refused.

    `null` accepts null too.
    """

    def check(path: str, value: object) -> list[str]:
        if (type(value) is int and low <= value <= high) or (null and value is None):
            return []
        return [f"{path}: {show(value)} is not a whole number from {low} to {high}"]

    return check


def boolean(path: str, value: object) -> list[str]:
    """Check that `value` is true or false."""
    return [] if isinstance(value, bool) else [f"{path}: {show(value)} is not true or false"]


def number(path: str, value: object) -> list[str]:
    """Check that `value` is a finite number of at most 64 bits."""
    if isinstance(value, float) and math.isfinite(value):
        return []
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return []
    return [f"{path}: {show(value)} is not a finite number"]


def items(low: int, high: int) -> Check:
    """Return a check for the number of items of a list or entries of an object."""

    def check(path: str, value: Any) -> list[str]:
        return [] if low <= len(value) <= high else [f"{path}: not {low} to {high} items"]

    return check


def sequence(item: Check, low: int, high: int) -> Check:
    """Return a check for a list."""

    def check(path: str, value: object) -> list[str]:
        if not isinstance(value, (list, tuple)) or not low <= len(value) <= high:
            return [f"{path}: not a list of {low} to {high} items"]
        return [line for i, entry in enumerate(value) for line in item(f"{path}[{i}]", entry)]

    return check


def mapping(key: Check, item: Check, low: int = 0, high: int = _MAX_ENTRIES) -> Check:
    """Return a check for an object with arbitrary keys."""

    def check(path: str, value: object) -> list[str]:
        if not isinstance(value, dict) or not low <= len(value) <= high:
            return [f"{path}: not an object of {low} to {high} entries"]
        problems = [line for name in value for line in key(path, name)]
        for name, entry in value.items():
            problems += item(at(path, name), entry)
        return problems

    return check


def record(fields: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Return a check for an object with exactly these fields.

    Unknown fields are accepted only with a neutral value (`config.options.is_neutral`).

    `optional` has the fields that older files lack.
    """
    known = {**fields, **(optional or {})}

    def check(path: str, value: object) -> list[str]:
        if not isinstance(value, dict):
            return [f"{path}: {show(value)} is not an object"]
        problems = [f"{at(path, name)}: missing" for name in fields if name not in value]
        for name, entry in value.items():
            if name in known:
                problems += known[name](at(path, name), entry)
            elif not is_neutral(entry):
                problems.append(f"{at(path, name)}: unknown, it needs a newer adapterhub")
        return problems

    return check


def free(path: str, value: object) -> list[str]:
    """Check a free-form JSON object: limited depth and size, finite, without local paths."""
    if not isinstance(value, dict):
        return [f"{path}: {show(value)} is not an object"]
    problems: list[str] = []
    queue: list[tuple[str, object, int]] = [(path, value, 1)]
    for visited, (location, entry, depth) in enumerate(queue):
        if visited >= _MAX_FREE_NODES or depth > _MAX_FREE_DEPTH:
            limits = f"{_MAX_FREE_NODES} values or {_MAX_FREE_DEPTH} levels"
            return [*problems, f"{path}: more than {limits}"]
        if isinstance(entry, dict):
            problems += [line for key in entry for line in _free_key(location, key)]
            queue += [(at(location, key), item, depth + 1) for key, item in entry.items()]
        elif isinstance(entry, (list, tuple)):
            queue += [(f"{location}[{i}]", item, depth + 1) for i, item in enumerate(entry)]
        else:
            problems += _free_leaf(location, entry)
    return problems


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
    """Return one line if `value` cannot be encoded as UTF-8, otherwise none."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return [f"{path}: {show(value)} contains a lone surrogate"]
    return []


# Also matches a path inside a longer text, such as a recorded command line.
_PATH = re.compile(
    r"""^/\S|^file:/|^~[\w.-]*$|^\\\\
    |(?:^|[\s='":(,;\[])(?:/[\w.+-]+/[\w.+-]|~[\w.-]*[/\\]|[A-Za-z]:[\\/]|\\\\\w)""",
    re.VERBOSE | re.IGNORECASE,
)


def path_problem(path: str, value: str) -> list[str]:
    """Return one line if `value` contains an absolute, home or Windows path, otherwise none."""
    if _PATH.search(value):
        return [f"{path}: {show(value)} contains an absolute path of one machine"]
    return []


def name_problem(path: str, value: object) -> list[str]:
    """Return one line if a value is not a valid adapter name, otherwise none."""
    if not isinstance(value, str) or not 0 < len(value) <= 200:
        return [f"{path}: {show(value)} is not a name of 1 to 200 characters"]
    if value != value.strip() or not value.isprintable():
        return [f"{path}: {show(value)} has surrounding whitespace or is not printable"]
    if {"", ".", ".."} & set(re.split(r"[/\\]", value)):
        return [f"{path}: {show(value)} has empty, '.' or '..' parts"]
    return surrogate_problem(path, value) + path_problem(path, value)


def name_problems(name: object) -> list[str]:
    """Return one line for each reason why an adapter name is invalid."""
    return name_problem("name", name)

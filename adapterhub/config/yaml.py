"""Options as text: YAML, the words `train.epochs=1`, and the calls of specs: `lora(rank=16)`.

YAML has the core schema of YAML 1.2: `1e-3` is a float, `no` is a string, `010` is ten.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import yaml

from adapterhub.errors import ConfigError, read_problem

MAX_BYTES = 256 << 10  # parsing more takes seconds


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Load the mapping in a YAML file; a byte-order mark is ignored.

    Raises:
        ConfigError: the file is missing, larger than `MAX_BYTES`, not UTF-8, or not a mapping in
            valid YAML (with line and column).
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(
                f"{path} is larger than {MAX_BYTES} bytes", expected="a recipe or other options"
            )
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except (OSError, ValueError) as error:
        raise ConfigError(read_problem(path, error)) from error
    return parse_mapping(text, str(path))


def dump_yaml(data: Mapping[str, object], *, for_all: bool = False) -> str:
    """Format data as YAML that `load_yaml` reads back as equal, in the same order.

    `for_all`: readers of YAML 1.1, such as PyYAML, also read it as equal data.
    """
    return yaml.dump(dict(data), Dumper=_DumperForAll if for_all else _Dumper, sort_keys=False)


def inline_yaml(value: object) -> str:
    """Format plain data as YAML on one line: [attn.q, attn.v]."""
    text: str = yaml.dump([value], Dumper=_Dumper, default_flow_style=True, width=1 << 30)
    return text.strip()[1:-1]


def parse_mapping(text: str, name: str) -> dict[str, Any]:
    """Parse a YAML mapping; `name` denotes the text in errors.

    Raises:
        ConfigError: the text is not valid YAML (with line and column), or not a mapping.
    """
    try:
        data = yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}, {_yaml_problem(error, text)}") from error
    except RecursionError as error:
        raise ConfigError(f"{name} is nested too deeply") from error
    except (ValueError, OverflowError) as error:  # an escape such as "\UFFFFFFFF"
        raise ConfigError(f"{name} contains an invalid character or number: {error}") from error
    if not isinstance(data, dict):
        problem = "is empty" if data is None else f"contains a {type(data).__name__}"
        raise ConfigError(f"{name} {problem}", expected="lines of the form `option: value`")
    return data


class Loader(yaml.SafeLoader):
    """YAML 1.2's core schema without aliases, tags or duplicate keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node; reject aliases and tags."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None):
            problem = "aliases (*name) and tags (!name) are not supported; quote the text"
            _raise_yaml_error(problem, event)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a dict; reject duplicate keys."""
        keys: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in keys:
                _raise_yaml_error(f"duplicate key {str(key.value)!r}", key)
            keys.add(str(key.value))
        return super().construct_mapping(node, deep)


def _raise_yaml_error(problem: str, location: Any) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, problem, location.start_mark)


def _construct_int(loader: Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    try:
        return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))
    except ValueError:  # Python's limit of 4300 digits
        _raise_yaml_error(f"{text[:20]}... has too many digits", node)


# The core schema: for each tag, a pattern and the first characters of the scalars it matches.
_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("+-0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("+-.0123456789"),
    ),
}


_TAG = "tag:yaml.org,2002:"


Loader.yaml_implicit_resolvers = {}


for _name, (_pattern, _starts) in _SCALARS.items():
    Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})\Z"), _starts)


Loader.add_constructor(_TAG + "int", _construct_int)


def _yaml_problem(error: yaml.YAMLError, text: str) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or error.context}"
    before = text[: getattr(error, "position", 0)]  # a character not allowed in YAML
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    return f"line {line}, column {column}: {getattr(error, 'reason', error)}"


class _Dumper(yaml.SafeDumper):
    """Quotes strings that `Loader` would read as another type."""

    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers


class _DumperForAll(yaml.SafeDumper):
    """Quotes strings that `Loader` or a reader of YAML 1.1 would read as another type."""


_DumperForAll.yaml_implicit_resolvers = {}


for _every in (Loader, yaml.SafeDumper):
    for _first, _resolvers in _every.yaml_implicit_resolvers.items():
        for _tag, _matches in _resolvers:
            _DumperForAll.add_implicit_resolver(_tag, _matches, [_first])


def plain_scalar(text: str) -> object:
    """Parse one unquoted YAML scalar; text that is not a valid scalar is returned unchanged."""
    loader = Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    try:
        return loader.construct_object(yaml.ScalarNode(tag, text))
    except yaml.YAMLError:
        return text


def merge_options(base: Mapping[str, object], override: Mapping[str, object]) -> dict[str, Any]:
    """Merge `override` into a copy of `base`, recursing into mappings."""
    merged: dict[str, Any] = {}
    for key in (*base, *(key for key in override if key not in base)):
        below, value = base.get(key), override.get(key, base.get(key))
        if isinstance(value, Mapping):
            value = merge_options(below if isinstance(below, Mapping) else {}, value)
        merged[key] = value
    return merged


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Parse `path=value` words such as `train.epochs=1` into nested data; the last one wins.

    A value is a YAML scalar, or a YAML `[...]` or `{...}`. Invalid YAML, and a method spec such as
    `lora(rank=4)`, is a string. An empty value is null.

    Raises:
        ConfigError: words without a `=` or with an empty name in their path; lists all of them.
    """
    nested: dict[str, Any] = {}
    problems = []
    for word in overrides:
        path, equals, text = word.partition("=")
        names = [name.strip() for name in path.split(".")]
        if not equals:
            problems.append(f"{word!r} has no '='")
        elif not all(names):
            problems.append(f"{word!r} has an empty name before the '='")
        else:
            try:
                nested = merge_options(nested, _nest(names, _word_value(text)))
            except yaml.constructor.ConstructorError as error:
                problems.append(f"{word!r}: {error.problem}")
    if problems:
        raise ConfigError(
            "options on the command line are invalid",
            offenders=problems,
            expected="option=value, with dots between nested names",
            hint="train.epochs=1",
        )
    return nested


_CALL_IN_LIST = re.compile(r"[A-Za-z][\w-]*\([^()'\"]*\)")


def _word_value(text: str) -> object:
    text = text.strip()
    if not text.startswith(("[", "{", "'", '"')):
        return plain_scalar(text)
    if "'" not in text and '"' not in text:
        # A comma between a method's options would end the list item, so quote the whole call.
        text = _CALL_IN_LIST.sub(lambda call: f'"{call[0]}"', text)
    try:
        value = yaml.load(text, Loader=Loader)
    except yaml.constructor.ConstructorError:
        raise
    except (yaml.YAMLError, RecursionError):
        return text
    return text if text[0] in "'\"" and not isinstance(value, str) else value


def _nest(names: list[str], value: object) -> dict[str, Any]:
    return {names[0]: _nest(names[1:], value) if names[1:] else value}


_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4,
          "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}  # fmt: skip


def seconds_of(text: str) -> float | None:
    """Return the seconds of a duration such as 30m or 1.5h; None for other texts."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([smhd])\w*\s*", text)
    return float(match[1]) * _SECONDS[match[2]] if match and float(match[1]) > 0 else None


def size_in_bytes(text: str) -> int | None:
    """Return the bytes of a size such as 2GiB, 500MB or 1024; None for other texts."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([kmgt]i?|)b?\s*", text.lower())
    return int(float(match[1]) * _BYTES[match[2]]) if match and float(match[1]) > 0 else None


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
    error = partial(spec_error, text, kind, examples)
    if len(text) > MAX_CHARACTERS:
        raise error()
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


def _parse_call(text: str, error: Callable[[], ConfigError]) -> tuple[str, dict[str, Any]]:
    call = _CALL.fullmatch(text)
    if call is None:
        raise error()
    options: dict[str, Any] = {}
    arguments = _split(call[2], error) if call[2] and call[2].strip() else []
    for argument in map(_ARGUMENT.fullmatch, arguments):
        if argument is None or argument[1] in options:
            raise error()
        options[argument[1]] = _parse_value(argument[2].strip(), error)
    return call[1], options


def _split(text: str, error: Callable[[], ConfigError]) -> list[str]:
    """Split at the commas outside of brackets and quotes; a last comma is allowed."""
    commas = [-1, *_commas(text, error), len(text)]
    items = [text[a + 1 : b] for a, b in pairwise(commas)]
    if len(items) > 1 and not items[-1].strip():
        items.pop()
    return items


def _commas(text: str, error: Callable[[], ConfigError]) -> Iterator[int]:
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
                raise error()
        elif character == "," and not closing:
            yield position
        position += 1
    if quote or closing:
        raise error()


def _parse_value(text: str, error: Callable[[], ConfigError]) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as cause:
        if _BARE.fullmatch(text):
            return plain_scalar(text)
        if not text.startswith(("[", "{")):
            raise error() from cause
    try:
        return yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as cause:
        raise error() from cause


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

"""YAML with the core schema of YAML 1.2: `1e-3` is a float, `no` is a string, `010` is ten.

Also command-line options, `train.epochs=1` words with YAML values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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

"""YAML by the core schema of YAML 1.2: `1e-3` is a float, `no` is a string, `010` is ten."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from adapterhub.errors import ConfigError, did_you_mean

MAX_BYTES = 256 << 10  # the parser needs seconds for more


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; a byte-order mark is dropped.

    Raises ConfigError where the file is missing, too large, not UTF-8, not YAML (with line and
    column), or does not hold a mapping.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path} has more than {MAX_BYTES} bytes", expected="a recipe")
        text = data.decode("utf-8-sig")
    except FileNotFoundError as error:
        near = did_you_mean(path.name, (entry.name for entry in path.parent.glob("*")))
        raise ConfigError(f"there is no file {str(path)!r}{near}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    return parse_mapping(text, str(path))


def dump_yaml(data: Mapping[str, object]) -> str:
    """YAML that `load_yaml` reads as the same data, in the order given."""
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False)


def parse_mapping(text: str, name: str) -> dict[str, Any]:
    """The mapping in a text; `name` is what errors call it.

    Raises ConfigError where it is not YAML (with line and column), or holds no mapping.
    """
    try:
        data = yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}, {_yaml_problem(error, text)}") from error
    except RecursionError as error:
        raise ConfigError(f"{name} is nested too deeply") from error
    except (ValueError, OverflowError) as error:  # an escape such as "\UFFFFFFFF"
        raise ConfigError(f"{name} holds what is no character or number: {error}") from error
    if not isinstance(data, dict):
        what = "is empty" if data is None else f"holds a {type(data).__name__}"
        raise ConfigError(f"{name} {what}", expected="lines of the form `option: value`")
    return data


class Loader(yaml.SafeLoader):
    """YAML 1.2's core schema, without aliases, without tags, and without a key given twice."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None):
            _yaml_error("aliases (*name) and tags (!name) are not read; quote the text", event)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                _yaml_error(f"{str(key.value)!r} is given twice", key)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _yaml_error(problem: str, at: Any) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, problem, at.start_mark)


def _construct_int(loader: Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    try:
        return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))
    except ValueError:  # Python refuses more than 4300 digits.
        _yaml_error(f"{text[:20]}... has too many digits", node)


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
    before = text[: getattr(error, "position", 0)]  # A character that YAML does not allow.
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    return f"line {line}, column {column}: {getattr(error, 'reason', error)}"


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that `Loader` would read as something else."""

    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers


def plain_scalar(text: str) -> object:
    """What YAML makes of a word that stands alone; a word that it cannot read stays a string."""
    loader = Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    try:
        return loader.construct_object(yaml.ScalarNode(tag, text))
    except yaml.YAMLError:
        return text

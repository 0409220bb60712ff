"""Options: one frozen dataclass is the definition; dicts, YAML and help texts derive from it.

Plain data comes in as a mapping (from YAML, JSON, the command line or Python). It is built
strictly: unknown keys, missing keys and values of a wrong type are listed in one `ConfigError`.
"""

from __future__ import annotations

import dataclasses
import re
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union

import yaml

from adapterhub.config.yaml import Loader, plain_scalar
from adapterhub.errors import AdapterhubError, ConfigError, did_you_mean

T = TypeVar("T")


def option(default: T, help: str) -> T:
    """A dataclass field with a default and the one line that documents it everywhere."""
    metadata = {"help": help}
    if isinstance(default, dict):  # each object gets a mapping of its own
        return typing.cast(T, dataclasses.field(default_factory=default.copy, metadata=metadata))
    field: T = dataclasses.field(default=default, metadata=metadata)
    return field


@dataclasses.dataclass(frozen=True)
class OptionDoc:
    """What a reader needs to know of one option; without a default that is `MISSING`."""

    name: str
    type: str
    default: object
    help: str


def options_of(cls: type) -> tuple[OptionDoc, ...]:
    """The options of one dataclass, in the order of its definition; nested ones are not opened."""
    hints = typing.get_type_hints(cls)
    return tuple(
        OptionDoc(f.name, type_text(hints[f.name]), _default(f), f.metadata.get("help", ""))
        for f in _fields(cls)
    )


def type_text(hint: object) -> str:
    """The values that an annotation takes, as a user writes them: `int | null`, `csv | tsv`."""
    args = typing.get_args(hint)
    if hint in (Any, object):
        return "anything"
    if _is_union(hint):
        return " | ".join(type_text(arg) for arg in args)
    if typing.get_origin(hint) is Literal:
        return " | ".join(map(str, args))
    if _container(hint) is list:
        return f"list of {type_text(args[0])}" if args else "list"
    if dataclasses.is_dataclass(hint):
        return f"mapping ({', '.join(f.name for f in _fields(hint))})"
    if _container(hint) is dict:
        return f"mapping of {type_text(args[1])}" if args else "mapping"
    return "null" if hint is type(None) else getattr(hint, "__name__", str(hint))


def from_dict(cls: type[T], data: Mapping[str, object], where: str = "") -> T:
    """Build a dataclass from plain data, strictly.

    Takes nested dataclasses, unions (the first member that fits), `Literal`, `tuple[X, ...]`,
    `dict[str, X]` and scalars. An int is taken for a float; nothing else is converted.

    `where` is put before each option's path in the error.

    Raises ConfigError with every unknown key, missing key and value of a wrong type.
    """
    wrong: list[str] = []
    built = _read_dataclass(cls, data, where, wrong)
    if wrong:
        place = f" of {where}" if where else ""
        raise ConfigError(f"{len(wrong)} option(s){place} cannot be used", offenders=wrong)
    return typing.cast(T, built)


def to_dict(obj: object) -> dict[str, Any]:
    """A dataclass as JSON-able data, such that `from_dict(type(obj), to_dict(obj)) == obj`.

    Raises ConfigError where a value is neither plain data nor a dataclass.
    """
    return typing.cast("dict[str, Any]", _plain(obj, ""))


def is_neutral(value: object) -> bool:
    """Whether an unknown field or option may be ignored: it is null, false, "", [] or {}.

    So is every new one at the value where it changes nothing (see `adapterhub.files.native`).
    """
    return value is None or value is False or value in ("", [], {}, ())


def merge_options(base: Mapping[str, object], override: Mapping[str, object]) -> dict[str, Any]:
    """A new dict: `base` with `override` laid over it, mapping by mapping; neither is changed."""
    merged: dict[str, Any] = {}
    for key in (*base, *(key for key in override if key not in base)):
        below, value = base.get(key), override.get(key, base.get(key))
        if isinstance(value, Mapping):
            value = merge_options(below if isinstance(below, Mapping) else {}, value)
        merged[key] = value
    return merged


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Nested data from `path=value` words such as `train.epochs=1`; the last of a path wins.

    A value is read as a YAML scalar, or as YAML's `[...]` or `{...}`; what YAML cannot read, and a
    method spec such as `lora(rank=4)`, stays a string. Nothing after the `=` is null.

    Raises ConfigError with every word that lacks a `=` or has an empty name in its path.
    """
    nested: dict[str, Any] = {}
    wrong = []
    for word in overrides:
        path, equals, text = word.partition("=")
        names = [name.strip() for name in path.split(".")]
        if not equals:
            wrong.append(f"{word!r} has no '='")
        elif not all(names):
            wrong.append(f"{word!r} has an empty name before the '='")
        else:
            try:
                nested = merge_options(nested, _nest(names, _override_value(text)))
            except yaml.constructor.ConstructorError as error:
                wrong.append(f"{word!r}: {error.problem}")
    if wrong:
        raise ConfigError(
            "options on the command line cannot be read",
            offenders=wrong,
            expected="option=value, with dots between nested names",
            hint="train.epochs=1",
        )
    return nested


_CALL_IN_LIST = re.compile(r"[A-Za-z][\w-]*\([^()'\"]*\)")


def _override_value(text: str) -> object:
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


def _fields(cls: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(cls) if field.init]


def _default(field: dataclasses.Field[Any]) -> object:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def _plain(value: object, path: str) -> object:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in _fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item, _join(path, str(key))) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
    raise ConfigError(
        f"{path} cannot be written: {reprlib.repr(value)} is a {type(value).__name__}",
        expected="numbers, strings, booleans, null, lists, mappings or dataclasses of these",
    )


def _is_union(hint: object) -> bool:
    return typing.get_origin(hint) in (Union, types.UnionType)


def _container(hint: object) -> type | None:
    origin = typing.get_origin(hint) or hint
    if origin in (tuple, list):
        return list
    return dict if origin in (dict, Mapping) or dataclasses.is_dataclass(hint) else None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _refuse(hint: object, value: object, path: str, wrong: list[str]) -> object:
    text = f"{path or 'the options'} is {reprlib.repr(value)}, expected {type_text(hint)}"
    literals = [m for m in (hint, *typing.get_args(hint)) if typing.get_origin(m) is Literal]
    if literals and isinstance(value, str):
        text += did_you_mean(value, (str(arg) for m in literals for arg in typing.get_args(m)))
    elif hint is str and isinstance(value, (bool, int, float)):
        text += "; put it in quotes"
    wrong.append(text)
    return None


def _read(hint: Any, value: object, path: str, wrong: list[str]) -> object:
    if hint in (Any, object):
        return value
    if _is_union(hint):
        return _read_union(hint, value, path, wrong)
    if _container(hint) is list:
        return _read_list(hint, value, path, wrong)
    if dataclasses.is_dataclass(hint):
        return _read_dataclass(hint, value, path, wrong)
    if _container(hint) is dict:
        return _read_mapping(hint, value, path, wrong)
    if not _fits(hint, value):
        return _refuse(hint, value, path, wrong)
    if hint is float:
        return float(typing.cast(float, value))
    return value


def _fits(hint: Any, value: object) -> bool:
    if typing.get_origin(hint) is Literal:
        return any(type(value) is type(arg) and value == arg for arg in typing.get_args(hint))
    if hint not in (bool, int, float, str, type(None)):
        raise TypeError(f"an option cannot be annotated {hint}")
    if hint in (int, float) and isinstance(value, bool):
        return False
    if hint is float and isinstance(value, int):
        return value.bit_length() < 1024
    return isinstance(value, hint)


def _read_union(hint: Any, value: object, path: str, wrong: list[str]) -> object:
    members = typing.get_args(hint)
    for member in sorted(members, key=lambda member: member is not type(value)):
        trial: list[str] = []
        built = _read(member, value, path, trial)
        if not trial:
            return built
    near = [member for member in members if isinstance(value, _container(member) or ())]
    if len(near) == 1:
        return _read(near[0], value, path, wrong)
    return _refuse(hint, value, path, wrong)


def _read_list(hint: Any, value: object, path: str, wrong: list[str]) -> object:
    args = typing.get_args(hint) or (Any, ...)
    kind = typing.get_origin(hint) or hint
    if not isinstance(value, (list, tuple)):
        return _refuse(hint, value, path, wrong)
    fixed = kind is tuple and args[-1] is not Ellipsis
    if fixed and len(value) != len(args):
        wrong.append(f"{path} has {len(value)} items, expected {len(args)}")
        return None
    kinds = args if fixed else (args[0],) * len(value)
    pairs = enumerate(zip(kinds, value, strict=True))
    built = [_read(each, item, f"{path}[{i}]", wrong) for i, (each, item) in pairs]
    return built if kind is list else tuple(built)


def _read_mapping(hint: Any, value: object, path: str, wrong: list[str]) -> object:
    kind = (typing.get_args(hint) or (str, Any))[1]
    if not isinstance(value, Mapping):
        return _refuse(hint, value, path, wrong)
    for key in value:
        if not isinstance(key, str):
            wrong.append(f"{path} has the key {key!r}, expected a string; put it in quotes")
    return {key: _read(kind, item, _join(path, str(key)), wrong) for key, item in value.items()}


def _read_dataclass(cls: Any, value: object, path: str, wrong: list[str]) -> object:
    if not isinstance(value, Mapping):
        return _refuse(cls, value, path, wrong)
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in _fields(cls)}
    before = len(wrong)
    for key in value:
        if key not in fields:
            near = did_you_mean(str(key), fields) or f"; there is {', '.join(fields) or 'none'}"
            wrong.append(f"{_join(path, str(key))} is not an option{near}")
    for name, field in fields.items():
        if name not in value and _default(field) is dataclasses.MISSING:
            wrong.append(f"{_join(path, name)} is missing, expected {type_text(hints[name])}")
    known = [name for name in fields if name in value]
    built = {name: _read(hints[name], value[name], _join(path, name), wrong) for name in known}
    if len(wrong) > before:
        return None
    try:
        return cls(**built)
    except AdapterhubError as error:
        wrong.append(f"{path}: {error}" if path else str(error))
        return None

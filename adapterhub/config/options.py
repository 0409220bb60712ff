"""Options as frozen dataclasses: the single source of dicts, YAML and help texts.

Plain data arrives as a mapping (from YAML, JSON, the command line or Python) and is read strictly:
one `ConfigError` lists every unknown key, missing key and value of the wrong type. `from_file`
reads the data of files in the same way. A hint such as `Annotated[str, check]` limits the values:
a check takes the path of a value and the value, and returns a line for each problem.

Alternative names of options: some are accepted, others only lead to a suggestion.

One rule for recipes and methods: an option is set by its own name, in its own group. In addition:

- a name may differ in case, and have hyphens instead of underscores: `Learning-Rate`;
- an alias (`lr`) is accepted in the group of its option and above it: `train.lr`, `lr`;
- an option that is unique to one group is accepted above it: `epochs` is `train.epochs`;
- a text instead of a group is an option of another group: `train=FILE` and `data=FILE` both mean
  `data.train=FILE`.

Options are converted to the normal form: each option under its own name, in its own group.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
import reprlib
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union

from adapterhub.config.yaml import dump_yaml, inline_yaml
from adapterhub.errors import (
    AdapterhubError,
    ConfigError,
    counted,
    did_you_mean,
    nearest,
    spelled_like,
)

T = TypeVar("T")
Check = Callable[[str, Any], list[str]]
Resumed: TypeAlias = Literal["same", "recorded", "length", "fixed"]
"""The effect of another value of an option on a resumed run.

    same        the result does not depend on the option
    recorded    the run continues, and the change is recorded as another stretch of it
    length      the run continues if its finished steps would have been the same
    fixed       it would be a different run
"""


def option(
    default: T,
    help: str = "",
    *,
    omitted: bool = False,
    resumed: Resumed | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> T:
    """Define a dataclass field with a default and a one-line help text.

    `omitted`: `to_dict` leaves the option out while it has its default, and `from_file` does not
    require it: an option added later must not change files that do not use it, or their digests.
    `resumed` is declared by each option of a recipe. `least`, `above` and `most` are the range of a
    number, checked by `range_problems`.
    """
    limits = {"least": least, "above": above, "most": most}
    metadata = {"help": help, "omitted": omitted, "resumed": resumed, "limits": limits}
    if isinstance(default, dict):  # a mutable default: one copy per object
        return typing.cast(T, dataclasses.field(default_factory=default.copy, metadata=metadata))
    field: T = dataclasses.field(default=default, metadata=metadata)
    return field


_WITHIN: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "least": ("at least", operator.ge),
    "above": ("more than", operator.gt),
    "most": ("at most", operator.le),
}


def range_problems(options: Any) -> list[str]:
    """Return a line for each number of a dataclass outside the range of its option."""
    problems = []
    for field in _fields(type(options)):
        value = getattr(options, field.name)
        limits = field.metadata.get("limits", {}) if isinstance(value, int | float) else {}
        own = {name: limit for name, limit in limits.items() if limit is not None}
        if not all(_WITHIN[name][1](value, limit) for name, limit in own.items()):
            range_ = " and ".join(f"{_WITHIN[name][0]} {limit:g}" for name, limit in own.items())
            problems.append(f"{field.name}: {value}, must be {range_}")
    return problems


def resumed_as(cls: Any, path: Sequence[str]) -> Resumed | None:
    """Return the effect of changing an option on a resumed run; None for an unknown option.

    `path` has the names of the enclosing options, and the keys of mappings.
    """
    name, *inner = path
    field = _fields_by_key(cls).get(name)
    if field is None:
        return None
    hint = _unchecked(hints_of(cls)[name])
    if typing.get_origin(hint) is dict and dataclasses.is_dataclass(typing.get_args(hint)[1]):
        hint, inner = typing.get_args(hint)[1], inner[1:]
    if dataclasses.is_dataclass(hint) and inner:
        return resumed_as(hint, inner)
    return typing.cast("Resumed | None", field.metadata.get("resumed"))


@dataclasses.dataclass(frozen=True)
class OptionDoc:
    """Documentation of one option; the default is `dataclasses.MISSING` if it is required."""

    name: str
    type: str
    default: object
    help: str


@functools.lru_cache(maxsize=256)
def options_of(cls: type) -> tuple[OptionDoc, ...]:
    """List the options of a dataclass in order; a nested dataclass is one option."""
    hints = hints_of(cls)
    return tuple(
        OptionDoc(_key(f), type_text(hints[_key(f)]), _default(f), f.metadata.get("help", ""))
        for f in _fields(cls)
    )


@functools.lru_cache(maxsize=256)
def hints_of(cls: Any) -> Mapping[str, Any]:
    """Return the annotation of each option of a dataclass, by the option's name."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {_key(field): hints[field.name] for field in _fields(cls)}


def type_text(hint: object) -> str:
    """Describe the values that an annotation accepts: `int | null`, `csv | tsv`."""
    hint = _unchecked(hint)
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
        return f"mapping ({', '.join(map(_key, _fields(hint)))})"
    if _container(hint) is dict:
        return f"mapping of {type_text(args[1])}" if args else "mapping"
    return "null" if hint is type(None) else getattr(hint, "__name__", str(hint))


class _Problems(list[str]):
    """The problems found in data.

    `suggest` completes the line of an unknown option. `of_file` means that the data comes from a
    file, possibly of another version, or is the object to write.
    """

    suggest: Callable[[str], str] | None = None
    of_file: bool = False
    inner: AdapterhubError | None = None


def from_dict(
    cls: type[T],
    data: Mapping[str, object],
    where: str = "",
    suggest: Callable[[str], str] | None = None,
) -> T:
    """Build a dataclass from plain data, strictly.

    Supports nested dataclasses, unions (the first member that accepts the value), `Literal`,
    `tuple[X, ...]`, `dict[str, X]` and scalars. An int is accepted as a float, and as a key:
    `{0: negative}` in YAML is `{"0": negative}`. Nothing else is converted.

    `where` is the prefix of each option's path in the error; `suggest` returns a replacement for an
    unknown option, by its path, or "".

    Raises:
        ConfigError: unknown keys, missing keys or values of the wrong type; lists all of them.
    """
    problems = _Problems()
    problems.suggest = suggest
    obj = _read_dataclass(cls, data, where, problems)
    if problems:
        if len(problems) == 1 and problems.inner is not None:
            raise problems.inner  # its message is complete
        named = counted(len(problems), "option") + (f" of {where}" if where else "")
        raise ConfigError(f"{named} {'are' if problems[1:] else 'is'} invalid", offenders=problems)
    return typing.cast(T, obj)


def from_file(cls: type[T], data: object, path: str = "") -> tuple[T | None, list[str]]:
    """Build a dataclass from the data of a file; return it, or None with a line for each problem.

    A file has all fields, except the ones that `to_dict` omits. Other fields are ignored if they
    have a neutral value (`is_neutral`), which a later version may write.

    `data` may be an object of `cls`, to be checked before writing.
    """
    problems = _Problems()
    problems.of_file = True
    obj = _read_dataclass(cls, data, path, problems)
    return typing.cast("T | None", obj), problems


def to_dict(obj: object) -> dict[str, Any]:
    """Convert a dataclass to JSON-serializable data, the inverse of `from_dict`.

    Raises:
        ConfigError: a value is neither plain data nor a dataclass.
    """
    return typing.cast("dict[str, Any]", _to_plain(obj, ""))


def is_neutral(value: object) -> bool:
    """Return whether an unknown field or option may be ignored: null, false, "", [] or {}.

    New options have a neutral value that changes nothing (see `adapterhub.files.native`).
    """
    return value is None or value is False or value in ("", [], {}, ())


def _fields(cls: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(cls) if field.init]


@functools.lru_cache(maxsize=256)
def _fields_by_key(cls: Any) -> Mapping[str, dataclasses.Field[Any]]:
    return {_key(field): field for field in _fields(cls)}


def _key(field: dataclasses.Field[Any]) -> str:
    """Return the name of a field's option, without the trailing `_` of Python keywords."""
    return field.name.removesuffix("_")


def _default(field: dataclasses.Field[Any]) -> object:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def _to_plain(value: object, path: str) -> object:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = _written(value)
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item, at(path, key)) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_to_plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
    raise ConfigError(
        f"cannot serialize {path}: {reprlib.repr(value)} is a {type(value).__name__}",
        expected="numbers, strings, booleans, null, lists, mappings or dataclasses of these",
    )


def _written(obj: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are not omitted."""
    return {
        _key(field): value
        for field in _fields(obj)
        if (value := getattr(obj, field.name)) != _default(field)
        or not field.metadata.get("omitted")
    }


def _is_union(hint: object) -> bool:
    return typing.get_origin(hint) in (Union, types.UnionType)


def _unchecked(hint: Any) -> Any:
    return hint.__origin__ if typing.get_origin(hint) is Annotated else hint


@functools.lru_cache(maxsize=1024)
def _container(hint: Any) -> type | None:
    hint = _unchecked(hint)
    origin = typing.get_origin(hint) or hint
    if origin in (tuple, list):
        return list
    return dict if origin in (dict, Mapping) or dataclasses.is_dataclass(hint) else None


def at(path: str, key: object) -> str:
    """Return the path of `key` inside `path`, for messages."""
    plain = isinstance(key, str) and re.fullmatch(r"[A-Za-z0-9_.-]{1,80}", key)
    name = str(key) if plain else show(key)
    return f"{path}.{name}" if path else name


def show(value: object) -> str:
    """Format `value` for a message: short, without control characters."""
    if isinstance(value, str):
        return ascii(value[:80])
    if value is None or isinstance(value, (bool, float)):
        return str(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 2**64 else "an integer of more than 64 bits"
    return f"a {type(value).__name__}"


def _refuse(hint: object, value: object, path: str, problems: _Problems) -> object:
    text = f"{path or 'the options'} is {reprlib.repr(value)}, expected {type_text(hint)}"
    literals = [m for m in (hint, *typing.get_args(hint)) if typing.get_origin(m) is Literal]
    if literals and isinstance(value, str):
        text += did_you_mean(value, (str(arg) for m in literals for arg in typing.get_args(m)))
    elif hint is str and isinstance(value, (bool, int, float)):
        text += "; put it in quotes"
    problems.append(text)
    return None


# The readers return the value as the annotation's type; if they add a problem to the list, the
# returned value is not used.


def _read(hint: Any, value: object, path: str, problems: _Problems) -> object:
    if hint in (Any, object):
        return value
    if typing.get_origin(hint) is Annotated:
        return _read_checked(hint, value, path, problems)
    if _is_union(hint):
        return _read_union(hint, value, path, problems)
    if _container(hint) is list:
        return _read_list(hint, value, path, problems)
    if dataclasses.is_dataclass(hint):
        return _read_dataclass(hint, value, path, problems)
    if _container(hint) is dict:
        return _read_mapping(hint, value, path, problems)
    if not _is_scalar_of(hint, value):
        return _refuse(hint, value, path, problems)
    return float(typing.cast(float, value)) if hint is float else value


def _read_checked(hint: Any, value: object, path: str, problems: _Problems) -> object:
    """Check a value: scalars directly, other values item by item before the whole."""
    inner, count = hint.__origin__, len(problems)
    has_items = _container(inner) is not None and Any not in typing.get_args(inner)
    result = _read(inner, value, path, problems) if has_items else value
    for check in hint.__metadata__:
        if len(problems) == count:
            problems += check(path, result)
    if has_items or len(problems) > count:
        return result
    return _read(inner, value, path, problems)


def _is_scalar_of(hint: Any, value: object) -> bool:
    if typing.get_origin(hint) is Literal:
        return any(type(value) is type(arg) and value == arg for arg in typing.get_args(hint))
    if hint not in (bool, int, float, str, type(None)):
        raise TypeError(f"unsupported annotation of an option: {hint}")
    if hint in (int, float) and isinstance(value, bool):
        return False
    if hint is float and isinstance(value, int):
        return value.bit_length() < 1024
    return isinstance(value, hint)


def _read_union(hint: Any, value: object, path: str, problems: _Problems) -> object:
    members = typing.get_args(hint)
    for member in sorted(members, key=lambda member: member is not type(value)):
        trial = _Problems()
        trial.of_file = problems.of_file
        result = _read(member, value, path, trial)
        if not trial:
            return result
    candidates = [
        member
        for member in members
        if isinstance(value, _container(member) or ()) or typing.get_origin(member) is Annotated
    ]
    if len(candidates) == 1:
        return _read(candidates[0], value, path, problems)
    return _refuse(hint, value, path, problems)


def _read_list(hint: Any, value: object, path: str, problems: _Problems) -> object:
    args = typing.get_args(hint) or (Any, ...)
    sequence = typing.get_origin(hint) or hint
    if not isinstance(value, (list, tuple)):
        return _refuse(hint, value, path, problems)
    is_fixed = sequence is tuple and args[-1] is not Ellipsis
    if is_fixed and len(value) != len(args):
        problems.append(f"{path} has {len(value)} items, expected {len(args)}")
        return None
    item_hints = args if is_fixed else (args[0],) * len(value)
    pairs = enumerate(zip(item_hints, value, strict=True))
    items = [_read(each, item, f"{path}[{i}]", problems) for i, (each, item) in pairs]
    return items if sequence is list else tuple(items)


def _read_mapping(hint: Any, value: object, path: str, problems: _Problems) -> object:
    key_hint, value_hint = typing.get_args(hint) or (str, Any)
    if not isinstance(value, Mapping):
        return _refuse(hint, value, path, problems)
    for key in value:
        if not isinstance(key, str) and type(key) is not int:
            problems.append(f"{path} has the key {key!r}, expected a string; put it in quotes")
        elif type(key) is int and str(key) in value:
            problems.append(f"{path} has the key {key} twice, as a number and in quotes")
        elif typing.get_origin(key_hint) is Annotated:  # a text with constraints
            _read(key_hint, str(key), path, problems)
    pairs = ((str(key), item) for key, item in value.items())
    return {key: _read(value_hint, item, at(path, key), problems) for key, item in pairs}


def _read_dataclass(cls: Any, value: object, path: str, problems: _Problems) -> object:
    if problems.of_file and isinstance(value, cls):
        value = _written(value)
    if not isinstance(value, Mapping):
        return _refuse(cls, value, path, problems)
    hints = hints_of(cls)
    fields = _fields_by_key(cls)
    count = len(problems)
    for key in value:
        if key not in fields:
            _refuse_unknown(key, value[key], at(path, key), fields, problems)
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[field.name] = _read(hints[name], value[name], at(path, name), problems)
        elif _is_required(field, problems.of_file):
            problems.append(f"{at(path, name)} is missing, expected {type_text(hints[name])}")
    if len(problems) > count:
        return None
    try:
        return cls(**arguments)
    except AdapterhubError as error:
        problems.append(f"{path}: {error}" if path else str(error))
        place = f"{path}: " if path else ""
        problems.inner = ConfigError(
            f"{place}{error.problem}",
            expected=error.expected,
            hint=error.hint,
            offenders=error.offenders,
        )
        return None


def _is_required(field: dataclasses.Field[Any], of_file: bool) -> bool:
    no_default = _default(field) is dataclasses.MISSING
    return no_default or (of_file and not field.metadata.get("omitted"))


def _refuse_unknown(
    key: object, value: object, path: str, names: Iterable[str], problems: _Problems
) -> None:
    if problems.of_file:
        if not is_neutral(value):
            problems.append(f"{path}: unknown, it needs a newer adapterhub")
        return
    near = (problems.suggest and problems.suggest(path)) or did_you_mean(str(key), names)
    near = near or f"; valid options: {', '.join(names) or 'none'}"
    problems.append(f"{path} is not an option{near}")


WIDTH = 80
_INDENT = "  "
_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def commented_options(
    cls: type, values: Mapping[str, object], required: Iterable[str] = ()
) -> Iterator[str]:
    """Yield the lines of the options of a dataclass, except nested dataclasses.

    Options without a value are left out; `required` options lack a usable default.
    """
    for option in options_of(cls):
        if option.name in values and not dataclasses.is_dataclass(option.default):
            yield from comment(option.help)
            yield from comment(_INDENT + values_text(option, option.name in required))
            value = values[option.name]
            if isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
                yield from dump_yaml({option.name: value}).rstrip("\n").split("\n")
            else:
                yield f"{option.name}: {inline_yaml(value)}"


def comment(text: str) -> list[str]:
    """Format a text as comment lines that fit 80 columns at an indentation of two levels."""
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
_OPEN = re.compile(r" \((?:null|empty): (.*)\)$", re.DOTALL)  # meaning of an unset option


def help_in_words(option: OptionDoc) -> tuple[str, str]:
    """Split a help text into the description and the behavior without the option, or ""."""
    left_out = _OPEN.search(option.help)
    return _OPEN.sub("", option.help), left_out[1] if left_out else ""


def values_in_words(option: OptionDoc, required: bool = False) -> str:
    """Describe the values and the default for the command line, without YAML terms."""
    members = [part for part in option.type.split(" | ") if part != "null"]
    *others, last = map(_in_words, members)
    values = f"{', '.join(others)} or {last}" if others else last
    if required or option.default is dataclasses.MISSING:
        return f"{values}; required" if values else "required"
    default = to_dict({"default": option.default})["default"]
    usual = (
        help_in_words(option)[1] or "none"
        if default in (None, "", [], {})
        else inline_yaml(default)
    )
    return "; ".join(filter(None, [values, f"default: {usual}"]))


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


@dataclass(frozen=True)
class OptionNames:
    """The names of a dataclass's options.

    Attributes:
        cls: the dataclass; options that are dataclasses are its groups.
        aliases: accepted alternative names, with the path of the option: `train.epochs`.
        meanings: other names that are not accepted, with a replacement to type.
        texts: the option that a text instead of a group sets, unless another group has that option.
    """

    cls: Any
    aliases: Mapping[str, str]
    meanings: Mapping[str, str]
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def normal_form(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return data with each known option under its own name, in its own group.

        Raises:
            ConfigError: an option is set twice, under different names, or a group is set to a value
                in addition to one of its options.
        """
        groups = self._groups()
        normal: dict[str, Any] = {}
        written: dict[str, list[str]] = {}
        both: list[str] = []
        for path, value in _leaves(data, groups):
            own = self._own_path(path, value, groups)
            written.setdefault(".".join(map(str, own)), []).append(".".join(map(str, path)))
            *above, name = own
            group = normal.setdefault(above[0], {}) if above else normal
            if isinstance(group, dict) and not isinstance(group.get(name), dict):
                group[name] = value
            elif value != {}:
                both.append(f"{own[0]}: as a value, and with options of its own")
        twice = [f"{own}: as {' and '.join(ways)}" for own, ways in written.items() if ways[1:]]
        if twice := [*twice, *both]:
            raise ConfigError("options are given twice", offenders=twice, expected="one of them")
        return normal

    def suggest(self, path: str) -> str:
        """Return a suggestion for an unknown option: "; try ...", or "" if nothing is similar.

        Names with a known meaning come first, then similar names of other groups.
        """
        name = path.rpartition(".")[2]
        meaning = self.meanings.get(name.lower().replace("-", "_")) or self.aliases.get(name)
        if meaning:
            return f"; try {meaning}"
        options = [f"{group}.{option}" for group, all in self._groups().items() for option in all]
        if same := [option for option in options if option.endswith(f".{name}")]:
            return f"; try {' or '.join(same)}"
        level = self._groups().get(path.rpartition(".")[0], _names(self.cls))
        places = {option.rpartition(".")[2]: option for option in options}
        elsewhere = [repr(places[near]) for near in nearest(name, places)]
        here = did_you_mean(name, level)
        return here or (f"; did you mean {' or '.join(elsewhere)}?" if elsewhere else "")

    def own_name(self, word: str) -> str | None:
        """Return the path of the option named by a word, with or without its group, or None."""
        path = tuple(word.split("."))
        groups = self._groups()
        *above, name = self._own_path(path, 0, groups)
        known = groups.get(".".join(above), ()) if above else _names(self.cls)
        return ".".join((*above, name)) if name in known else None

    def _groups(self) -> dict[str, list[str]]:
        return {
            name: _names(hint)
            for name, hint in hints_of(self.cls).items()
            if dataclasses.is_dataclass(hint)
        }

    def _own_path(
        self, path: tuple[str, ...], value: object, groups: Mapping[str, list[str]]
    ) -> tuple[str, ...]:
        """Return the path of the option that is set at a path."""
        *above, name = path = self._respelled(path, groups)
        is_option = name in (groups.get(above[0], ()) if above else _names(self.cls))
        if is_option and not (name in groups and not above and isinstance(value, str)):
            return path
        if is_option and name in self.texts:
            return tuple(self.texts[name].split("."))
        target = tuple(self.aliases[name].split(".")) if name in self.aliases else ()
        if target and target[: len(above)] == tuple(above):
            return target
        having = [] if above else [group for group, options in groups.items() if name in options]
        return (having[0], name) if len(having) == 1 else path

    def _respelled(self, path: tuple[str, ...], groups: Mapping[str, list[str]]) -> tuple[str, ...]:
        """Return a path with the exact spelling of the group and the option."""
        *above, name = path
        places = [_respelled(group, groups) for group in above]
        options = [o for group in (places[:1] or groups) for o in groups.get(group, ())]
        own = [] if places else _names(self.cls)
        known = dict.fromkeys([*own, *options, *self.aliases])
        return (*places, _respelled(name, own if name in own else known))


def _respelled(name: object, known: Collection[str]) -> Any:
    """Return the known name spelled like `name`; a YAML key may not be a text."""
    return name if name in known or not isinstance(name, str) else spelled_like(name, known)


def _leaves(
    data: Mapping[str, Any], groups: Mapping[str, list[str]]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and value of each option; an empty or non-mapping group counts as one."""
    for key, value in data.items():
        if _respelled(key, groups) in groups and isinstance(value, Mapping) and value:
            for name, inner in value.items():
                yield (key, name), inner
        else:
            yield (key,), value


def _names(cls: Any) -> list[str]:
    return [option.name for option in options_of(cls)]

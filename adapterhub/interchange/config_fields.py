"""Strict reading of other libraries' configuration files (JSON objects of options).

An unknown option is accepted only with a neutral value (null, false, empty), which a later version
of the library writes where the option has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterhub.config.options import is_neutral
from adapterhub.errors import FileError
from adapterhub.files import schema
from adapterhub.files.atomic import UnreadableError, read_file
from adapterhub.files.schema import shorten, show


def any_value(path: str, value: object) -> list[str]:
    """Accept every value."""
    return []


@dataclass(frozen=True)
class ConfigField:
    """One option: the check of its value, its default, and whether it must be present."""

    check: schema.Check = any_value
    default: Any = None
    required: bool = False


TRAINING_ONLY = ConfigField()  # an option that does not change what the adapter computes


def only(*values: Any) -> ConfigField:
    """Return a field for an option that is supported at these values; the first is the default."""

    def check(path: str, value: object) -> list[str]:
        if value in values:
            return []
        supported = show(values[0])
        return [f"{path}: {show(value)} changes what is computed, only {supported} is supported"]

    return ConfigField(check, values[0])


def optional(check: schema.Check) -> schema.Check:
    """Return a check that also accepts null."""
    return lambda path, value: [] if value is None else check(path, value)


def either(description: str, *checks: schema.Check) -> schema.Check:
    """Return a check that accepts what any of `checks` accepts."""

    def check(path: str, value: object) -> list[str]:
        if any(not one(path, value) for one in checks):
            return []
        return [f"{path}: {show(value)} is not {description}"]

    return check


def read_json_object(path: Path, max_bytes: int, *, expected: str) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        FileError: the file is missing, too large, or not a JSON object.
    """
    try:
        data = read_file(path, 0, max_bytes, None)
    except UnreadableError as error:
        raise FileError(f"{path}: {error}", expected=expected) from None
    tree, problems = schema.parse_object(data, max_bytes)
    if problems:
        raise FileError(f"{path} cannot be read", offenders=shorten(problems))
    return tree


def config_problems(
    config: Mapping[str, Any], fields: Mapping[str, ConfigField], path: str = ""
) -> list[str]:
    """Return one line for each unsupported, unknown or missing option."""
    problems = []
    for name, value in sorted(config.items()):
        location = schema.at(path, name)
        if name in fields:
            problems += fields[name].check(location, value)
        elif not is_neutral(value):
            problems.append(f"{location}: unknown, and not neutral: {show(value)}")
    missing = [name for name, field in fields.items() if field.required and name not in config]
    return problems + [f"{schema.at(path, name)}: missing" for name in missing]

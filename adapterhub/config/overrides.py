"""Options on the command line: `train.epochs=1` words, laid over a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from adapterhub.config.yaml import Loader, plain_scalar
from adapterhub.errors import ConfigError


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
                nested = merge_options(nested, _nest(names, _parse_value(text)))
            except yaml.constructor.ConstructorError as error:
                problems.append(f"{word!r}: {error.problem}")
    if problems:
        raise ConfigError(
            "invalid option(s) on the command line",
            offenders=problems,
            expected="option=value, with dots between nested names",
            hint="train.epochs=1",
        )
    return nested


_CALL_IN_LIST = re.compile(r"[A-Za-z][\w-]*\([^()'\"]*\)")


def _parse_value(text: str) -> object:
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

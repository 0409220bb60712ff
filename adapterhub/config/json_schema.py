"""JSON schemas of options, from which editors complete and check YAML files."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

from adapterhub.config.options import hints_of, options_of, to_dict

_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


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

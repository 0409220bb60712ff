"""A small check of data against a JSON schema: the keywords that recipe_schema uses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

TYPES: dict[str, Any] = {
    "boolean": bool, "integer": int, "number": (int, float), "string": str, "null": type(None),
    "array": list, "object": dict,
}  # fmt: skip
KNOWN = {
    "$schema", "$defs", "$ref", "title", "description", "default", "type", "properties",
    "additionalProperties", "required", "enum", "const", "anyOf", "items", "prefixItems",
    "minItems", "minProperties", "maxProperties", "pattern",
}  # fmt: skip


def problems(data: Any, schema: Any, root: Any = None, path: str = "") -> list[str]:
    """List where data does not fit a schema."""
    return [*_problems(data, schema, root or schema, path)]


def _problems(data: Any, schema: Any, root: Any, path: str) -> Iterator[str]:
    if schema is True or schema is False:
        yield from () if schema else [f"{path} is not allowed"]
        return
    assert schema.keys() <= KNOWN, schema.keys() - KNOWN
    if "$ref" in schema:
        target = root
        for name in schema["$ref"].removeprefix("#/").split("/"):
            target = target[name]
        yield from _problems(data, target, root, path)
    if "type" in schema and not _is_of(data, schema["type"]):
        yield f"{path} is {data!r}, not {schema['type']}"
        return
    if data not in schema.get("enum", [data]) or data != schema.get("const", data):
        yield f"{path} is {data!r}"
    if "anyOf" in schema and all(problems(data, each, root) for each in schema["anyOf"]):
        yield f"{path} is {data!r}: none of {len(schema['anyOf'])}"
    if "pattern" in schema and not re.search(schema["pattern"], data):
        yield f"{path} is {data!r}"
    if isinstance(data, dict):
        yield from _object_problems(data, schema, root, path)
    if isinstance(data, list):
        each = schema.get("prefixItems", [schema.get("items", True)] * len(data))
        for number, (item, own) in enumerate(zip(data, each, strict=False)):
            yield from _problems(item, own, root, f"{path}[{number}]")
        if len(data) < schema.get("minItems", 0):
            yield f"{path} is too short"


def _object_problems(data: Any, schema: Any, root: Any, path: str) -> Iterator[str]:
    own = schema.get("properties", {})
    for key, value in data.items():
        yield from _problems(
            value, own.get(key, schema.get("additionalProperties", True)), root, f"{path}.{key}"
        )
    yield from (f"{path}.{key} is missing" for key in schema.get("required", ()) if key not in data)
    if not schema.get("minProperties", 0) <= len(data) <= schema.get("maxProperties", 1 << 30):
        yield f"{path} has {len(data)} keys"


def _is_of(data: Any, types: str | list[str]) -> bool:
    allowed = [types] if isinstance(types, str) else types
    if isinstance(data, bool):
        return "boolean" in allowed
    return any(isinstance(data, TYPES[each]) for each in allowed)

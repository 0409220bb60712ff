"""The JSON schema describes the data that from_dict accepts."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

from adapterhub.config.options import json_schema, option, options_of
from adapterhub.recipe.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Inner:
    count: int = option(1, "how many")


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner = dataclasses.field(default_factory=Inner)
    mode: Literal["fast", "slow"] | None = option(None, "the mode")
    rates: dict[str, float] = option({"a": 0.5}, "rates by name")
    sites: tuple[str, ...] = option(("q", "v"), "sites")
    span: tuple[int, bool] = option((0, True), "two values")
    spec: Any = option(None, "anything")


def test_each_annotation_has_its_schema():
    schema = json_schema(Outer)
    assert (schema["title"], schema["type"], schema["required"]) == ("Outer", "object", ["name"])
    assert schema["additionalProperties"] is False
    assert schema["properties"] == {
        "name": {"type": "string"},
        "inner": {
            "type": "object",
            "properties": {"count": {"type": "integer", "description": "how many", "default": 1}},
            "additionalProperties": False,
        },
        "mode": {
            "anyOf": [{"enum": ["fast", "slow"]}, {"type": "null"}],
            "description": "the mode",
            "default": None,
        },
        "rates": {
            "type": "object",
            "additionalProperties": {"type": "number"},
            "description": "rates by name",
            "default": {"a": 0.5},
        },
        "sites": {
            "type": "array",
            "items": {"type": "string"},
            "description": "sites",
            "default": ["q", "v"],
        },
        "span": {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "boolean"}],
            "items": False,
            "minItems": 2,
            "description": "two values",
            "default": [0, True],
        },
        "spec": {"description": "anything", "default": None},
    }


def test_the_schema_of_recipes_is_json_and_lists_every_option():
    schema = json.loads(json.dumps(json_schema(Recipe), allow_nan=False))
    assert set(schema["properties"]) == {option.name for option in options_of(Recipe)}
    train = schema["properties"]["train"]["properties"]
    assert train["log_every"]["type"] == "integer"
    assert "cosine" in train["schedule"]["anyOf"][0]["enum"]

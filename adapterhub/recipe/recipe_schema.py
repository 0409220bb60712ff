"""The JSON schema of recipes, with the options of all methods and tasks, for editors.

A recipe names it in its first line, as a file beside it: editors complete and check the recipe.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapterhub.config.described import json_schema, options_schema
from adapterhub.files.atomic import replace_file
from adapterhub.methods._base import METHODS
from adapterhub.methods._described import described_methods
from adapterhub.recipe.output_folder import SCHEMA
from adapterhub.recipe.recipe import Recipe
from adapterhub.recipe.recipe_stages import STAGES
from adapterhub.tasks import TASKS

SCHEMA_LINE = f"# yaml-language-server: $schema={SCHEMA}\n"


def recipe_schema() -> dict[str, Any]:
    """Derive the schema of recipes from the classes of recipes, methods and tasks."""
    schema = json_schema(Recipe)
    several = {"type": "array", "items": {"$ref": "#/$defs/method"}, "minItems": 1}
    described = described_methods()
    method = _spec_schema({name: (m.summary, m.options) for name, m in described.items()})
    task = _spec_schema({name: (cls.summary, cls) for name, cls in TASKS.items()})
    task["anyOf"][-1]["maxProperties"] = 1
    method["anyOf"].append(several)
    for name in ("method", "task"):
        schema["properties"][name]["$ref"] = f"#/$defs/{name}"
    stage = _stage_schema(schema["properties"])
    schema["properties"][STAGES] = {
        "type": "array",
        "items": {"$ref": "#/$defs/stage"},
        "minItems": 1,
        "description": "runs of which each may start from an earlier one, with options of their "
        "own",
    }
    of_task = schema["properties"]["tasks"]["additionalProperties"]["properties"]
    of_task["task"]["anyOf"] = [{"$ref": "#/$defs/task"}, {"type": "null"}]
    return schema | {"$defs": {"method": method, "task": task, "stage": stage}}


def _stage_schema(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a stage: a name, and options as in the recipe around it."""
    properties = {name: {"$ref": f"#/properties/{name}"} for name in options if name != "output"}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name"],
        "additionalProperties": False,
    }


def write_schema(folder: Path) -> None:
    """Write the schema beside a recipe."""
    registered = (*METHODS.imported().values(), *TASKS.values())
    replace_file(folder / SCHEMA, _schema_bytes(registered))


@functools.cache
def _schema_bytes(registered: tuple[type, ...]) -> bytes:
    """Write the schema as JSON, once for the classes that are registered."""
    text = json.dumps(recipe_schema(), ensure_ascii=False, separators=(",", ":"))
    return f"{text}\n".encode()


def _spec_schema(choices: Mapping[str, tuple[str, type]]) -> dict[str, Any]:
    """Return the schema of a spec: a name, a call as text, or {name: options}.

    `choices` has the summary and the options of each method or task.
    """
    names = [{"const": name, "description": text} for name, (text, _) in sorted(choices.items())]
    options = {
        name: {"description": text, **_or_null(options_schema(cls))}
        for name, (text, cls) in sorted(choices.items())
    }
    return {
        "anyOf": [
            *names,
            {"type": "string", "pattern": rf"^\s*({'|'.join(sorted(choices))})\s*[(,]"},
            {
                "type": "object",
                "properties": options,
                "additionalProperties": False,
                "minProperties": 1,
            },
        ]
    }


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {"type": ["object", "null"]}

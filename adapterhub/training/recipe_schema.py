"""The JSON schema of recipes, with the options of all methods and tasks, for editors.

A recipe names it in its first line, as a file beside it: editors complete and check the recipe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapterhub.config.json_schema import json_schema, options_schema
from adapterhub.files.atomic import replace_file
from adapterhub.methods import METHODS
from adapterhub.tasks import TASKS
from adapterhub.training.output_folder import SCHEMA
from adapterhub.training.recipe import Recipe

SCHEMA_LINE = f"# yaml-language-server: $schema={SCHEMA}\n"


def recipe_schema() -> dict[str, Any]:
    """Derive the schema of recipes from the classes of recipes, methods and tasks."""
    schema = json_schema(Recipe)
    several = {"type": "array", "items": {"$ref": "#/$defs/method"}, "minItems": 1}
    method, task = _spec_schema(METHODS), _spec_schema(TASKS)
    task["anyOf"][-1]["maxProperties"] = 1
    method["anyOf"].append(several)
    for name in ("method", "task"):
        schema["properties"][name]["$ref"] = f"#/$defs/{name}"
    return schema | {"$defs": {"method": method, "task": task}}


def write_schema(folder: Path) -> None:
    """Write the schema beside a recipe."""
    text = json.dumps(recipe_schema(), ensure_ascii=False, separators=(",", ":"))
    replace_file(folder / SCHEMA, f"{text}\n".encode())


def _spec_schema(classes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a spec: a name, a call as text, or {name: options}."""
    names = [{"const": name, "description": cls.summary} for name, cls in sorted(classes.items())]
    options = {
        name: {"description": cls.summary, **_or_null(options_schema(cls))}
        for name, cls in sorted(classes.items())
    }
    return {
        "anyOf": [
            *names,
            {"type": "string", "pattern": rf"^\s*({'|'.join(sorted(classes))})\s*[(,]"},
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

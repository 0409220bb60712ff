"""What is written of recipes: one with a comment above each option, and the schema for editors.

`adapterhub recipe` prints the former. A recipe names the latter in its first line, as a file beside
it: the JSON schema with the options of all methods and tasks, by which editors complete and check.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from adapterhub.config.described import (
    below,
    comment,
    commented_options,
    json_schema,
    options_schema,
)
from adapterhub.config.options import options_of, to_dict
from adapterhub.data.options import DataOptions
from adapterhub.files.atomic import replace_file
from adapterhub.methods.common.base import METHODS
from adapterhub.methods.common.spec import described_method, described_methods, spec_options
from adapterhub.recipe.options import TrainOptions
from adapterhub.recipe.output_folder import SCHEMA
from adapterhub.recipe.recipe import REQUIRED, SPECS, Recipe
from adapterhub.recipe.several_runs import STAGES
from adapterhub.tasks import TASKS, parse_task

_GROUPS: dict[str, tuple[type, str]] = {
    "data": (DataOptions, "the data, its format and its columns"),
    "train": (TrainOptions, "how to train"),
}


def commented_recipe(recipe: Recipe) -> str:
    """Return the recipe as YAML with all options, those of its methods and its task too.

    Raises:
        ConfigError: an unknown method, task or option.
    """
    values = to_dict(recipe)
    help_texts = {option.name: option.help for option in options_of(Recipe)}
    lines = ["# adapterhub train FILE", ""]
    lines += commented_options(Recipe, {k: values[k] for k in values if k not in SPECS}, REQUIRED)
    lines += ["", *comment(help_texts["method"]), *below("method", _methods(recipe))]
    lines += ["", *comment(help_texts["task"])]
    lines += _task(recipe.task)
    for group, (cls, text) in _GROUPS.items():
        required = [path.rpartition(".")[2] for path in REQUIRED if path.startswith(f"{group}.")]
        of_group = commented_options(cls, values[group], required)
        lines += ["", *comment(text), *below(group, of_group)]
    return SCHEMA_LINE + "".join(f"{line}\n" for line in lines)


def _task(spec: object) -> list[str]:
    """Return the lines of {name: options}."""
    if spec is None:
        return ["task: null"]
    task = parse_task(spec)
    options = below(task.name, commented_options(type(task), to_dict(task)))
    return [*below("task", [*comment(f"{task.name}: {task.summary}"), *options])]


def _methods(recipe: Recipe) -> Iterator[str]:
    """Yield the lines of {name: options}; of a list of these if a name occurs twice."""
    specs = spec_options(recipe.method or ())  # type: ignore[arg-type]
    twice = len(dict(specs)) < len(specs)
    for name, options in specs:
        method = described_method(name)
        rate = f"its learning rate is {method.learning_rate:g}"
        yield from comment(f"{name}: {method.summary}; {rate}")
        mapping = below(name, commented_options(method.options, options))
        for number, line in enumerate(mapping):
            yield f"{'  ' if number else '- '}{line}" if twice else line


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
    schema["properties"]["method"]["$ref"] = "#/$defs/method"
    schema["properties"]["task"]["anyOf"] = [{"$ref": "#/$defs/task"}, {"type": "null"}]
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

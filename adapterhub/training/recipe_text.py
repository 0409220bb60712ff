"""A recipe with every option and a comment above each: what `adapterhub recipe` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from adapterhub.config.commented_yaml import below, comment, commented_options
from adapterhub.config.options import options_of, to_dict
from adapterhub.data.options import DataOptions
from adapterhub.methods import METHODS
from adapterhub.methods._spec import parse_methods
from adapterhub.tasks import TASKS, parse_task
from adapterhub.training.options import TrainOptions
from adapterhub.training.recipe import REQUIRED, SPECS, Recipe
from adapterhub.training.recipe_schema import SCHEMA_LINE

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
    methods = [(m.name, to_dict(m)) for m in parse_methods(recipe.method)]  # type: ignore[arg-type]
    task = parse_task(recipe.task)
    help_texts = {option.name: option.help for option in options_of(Recipe)}
    lines = ["# adapterhub train FILE", ""]
    lines += commented_options(Recipe, {k: values[k] for k in values if k not in SPECS}, REQUIRED)
    lines += ["", *comment(help_texts["method"]), *below("method", _specs(METHODS, methods))]
    lines += ["", *comment(help_texts["task"])]
    lines += below("task", _specs(TASKS, [(task.name, to_dict(task))]))
    for group, (cls, text) in _GROUPS.items():
        required = [path.rpartition(".")[2] for path in REQUIRED if path.startswith(f"{group}.")]
        options = commented_options(cls, values[group], required)
        lines += ["", *comment(text), *below(group, options)]
    return SCHEMA_LINE + "".join(f"{line}\n" for line in lines)


def _specs(classes: Mapping[str, Any], specs: list[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """Yield the lines of {name: options}; of a list of these if a name occurs twice."""
    twice = len(dict(specs)) < len(specs)
    for name, options in specs:
        cls = classes[name]
        rate = getattr(cls, "learning_rate", None)
        summary = f"{name}: {cls.summary}" + (f"; its learning rate is {rate:g}" if rate else "")
        mapping = list(below(name, commented_options(cls, options)))
        yield from comment(summary)
        for number, line in enumerate(mapping):
            yield f"{'  ' if number else '- '}{line}" if twice else line

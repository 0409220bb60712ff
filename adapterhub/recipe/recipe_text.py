"""A recipe with every option and a comment above each: what `adapterhub recipe` prints."""

from __future__ import annotations

from collections.abc import Iterator

from adapterhub.config.described import below, comment, commented_options
from adapterhub.config.options import options_of, to_dict
from adapterhub.data.options import DataOptions
from adapterhub.methods._described import described_method, spec_options
from adapterhub.recipe.options import TrainOptions
from adapterhub.recipe.recipe import REQUIRED, SPECS, Recipe
from adapterhub.recipe.recipe_schema import SCHEMA_LINE
from adapterhub.tasks import parse_task

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
    task = parse_task(recipe.task)
    help_texts = {option.name: option.help for option in options_of(Recipe)}
    lines = ["# adapterhub train FILE", ""]
    lines += commented_options(Recipe, {k: values[k] for k in values if k not in SPECS}, REQUIRED)
    lines += ["", *comment(help_texts["method"]), *below("method", _methods(recipe))]
    lines += ["", *comment(help_texts["task"])]
    options = commented_options(type(task), to_dict(task))
    lines += below("task", [*comment(f"{task.name}: {task.summary}"), *below(task.name, options)])
    for group, (cls, text) in _GROUPS.items():
        required = [path.rpartition(".")[2] for path in REQUIRED if path.startswith(f"{group}.")]
        of_group = commented_options(cls, values[group], required)
        lines += ["", *comment(text), *below(group, of_group)]
    return SCHEMA_LINE + "".join(f"{line}\n" for line in lines)


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

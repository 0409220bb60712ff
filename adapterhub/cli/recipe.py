"""`adapterhub recipe`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from adapterhub.cli._format import say, say_text
from adapterhub.cli.train import RecipeCommand, nested_flags, recipe_flags, recipe_words
from adapterhub.config.options import below, comment, commented_options, options_of, to_dict
from adapterhub.config.user_folders import is_there
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, OutputError, nearest, spelled_like, unknown
from adapterhub.methods.common.base import described_method, spec_options
from adapterhub.recipe.recipe import (
    REQUIRED,
    SCHEMA_LINE,
    SPECS,
    Recipe,
    TrainOptions,
    read_draft,
)
from adapterhub.tasks import parse_task
from adapterhub.tasks.common.distillation import TeacherOptions
from adapterhub.tasks.common.infer_task import DEFAULT, usual_method


@click.command("recipe", cls=RecipeCommand)
@click.argument("words", nargs=-1, metavar="[METHOD] [TASK] [RECIPE.yaml] [KEY=VALUE]...")
@recipe_flags
@click.option(
    "--save",
    metavar="FILE",
    help="Write the recipe to a new file, and the schema for completion in editors next to it.",
)
def command(words: tuple[str, ...], save: str | None, **flags: Any) -> None:
    """Print a recipe with every option, each with a comment.

    Flags, KEY=VALUE and RECIPE.yaml set options as for `adapterhub train`; the others have their
    defaults. For editors, write the schema once: `adapterhub train --schema > recipe.schema.json`
    (--save does that, too).
    """
    specs, others = _split_names(words)
    recipe = read_draft(*recipe_words(others, flags), specs | nested_flags(flags))
    text = commented_recipe(recipe)
    if save is None:
        say_text(text.removesuffix("\n"))
    else:
        _save(Path(save), text)


def _split_names(words: tuple[str, ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Split the arguments into the named method and task, and the rest.

    Raises:
        ConfigError: there are two methods or tasks, or a word that is nearly a name.
    """
    from adapterhub.methods.common.base import described_methods
    from adapterhub.tasks import TASKS

    words = tuple(spelled_like(word, (*described_methods(), *TASKS)) for word in words)
    specs = {
        option: [word for word in words if word in names]
        for option, names in (("method", described_methods()), ("task", TASKS))
    }
    if several := [f"{key}: {', '.join(named)}" for key, named in specs.items() if named[1:]]:
        raise ConfigError(
            "more than one method or task",
            offenders=several,
            expected="one of each",
            hint="--method '[prefix, lora]', which composes them",
        )
    known = (*described_methods(), *TASKS)
    for word in words:
        is_name = re.fullmatch(r"[\w-]+", word) and word not in known and not is_there(word)
        if is_name and nearest(word, known):  # otherwise it may be a Hub dataset
            raise unknown("method or task", word, known, hint="adapterhub methods, tasks")
    named = {option: values[0] for option, values in specs.items() if values}
    return named, tuple(word for word in words if word not in named.values())


def _save(path: Path, text: str) -> None:
    from adapterhub.files.atomic import replace_file
    from adapterhub.recipe.output_folder import SCHEMA
    from adapterhub.recipe.recipe import schema_bytes

    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
        replace_file(path.parent / SCHEMA, schema_bytes())
    except FileExistsError as error:
        raise OutputError(f"{path} exists", hint="another --save, or delete it") from error
    say(f"wrote {path}, and {path.parent / SCHEMA} for editors")
    say(f"next: adapterhub train {path}")


_GROUPS: dict[str, tuple[type, str]] = {
    "teacher": (TeacherOptions, "the teacher whose probabilities are learned"),
    "data": (DataOptions, "the data, its format and its columns"),
    "train": (TrainOptions, "how to train"),
}


def commented_recipe(recipe: Recipe) -> str:
    """Return the recipe as YAML with all options, including the options of its methods and task.

    Raises:
        ConfigError: a method, task or option is unknown.
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
        of_group = commented_options(cls, values.get(group) or to_dict(cls()), required)
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
    spec = recipe.method
    if spec is None and recipe.from_ is None:
        spec = usual_method(parse_task(recipe.task or DEFAULT).head)
    specs = spec_options(spec or ())  # type: ignore[arg-type]
    twice = len(dict(specs)) < len(specs)
    for name, options in specs:
        method = described_method(name)
        rate = f"its learning rate is {method.learning_rate:g}"
        yield from comment(f"{name}: {method.summary}; {rate}")
        mapping = below(name, commented_options(method.options, options))
        for number, line in enumerate(mapping):
            yield f"{'  ' if number else '- '}{line}" if twice else line

"""`adapterhub options`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict

import click

from adapterhub.cli._format import print_json, say_text
from adapterhub.cli._options import as_json_option
from adapterhub.cli._options_text import method_options, print_options, task_options
from adapterhub.config.options import OptionDoc, options_of
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, spelled_like, unknown
from adapterhub.recipe.recipe import NAMES, REQUIRED, Recipe, TrainOptions
from adapterhub.tasks.common.distillation import TeacherOptions

_GROUPS: dict[str, tuple[str, type]] = {
    "recipe": ("", Recipe),
    "teacher": ("teacher.", TeacherOptions),
    "data": ("data.", DataOptions),
    "train": ("train.", TrainOptions),
}


@click.command("options")
@click.argument(
    "names", nargs=-1, metavar="[recipe | teacher | data | train | METHOD | TASK | OPTION]..."
)
@as_json_option
def command(names: tuple[str, ...], as_json: bool) -> None:
    """List the options of recipes, methods and tasks, with values and defaults.

    An option is set in a recipe, or on the command line: train.epochs=10,
    --method 'lora(rank=4)', --task 'causal-lm(pack=true)'.
    """
    sections = dict(map(_section, names or _GROUPS))
    if as_json:
        print_json({title: [asdict(o) for o in sections[title]] for title in sections}, indent=2)
        return
    for title, options in sections.items():
        print_options(title, options, REQUIRED)
    if not names:
        say_text(
            "Options of methods and tasks: adapterhub options METHOD, adapterhub options TASK\n"
            "All options in a file to edit: adapterhub recipe > recipe.yaml"
        )


def _section(name: str) -> tuple[str, Sequence[OptionDoc]]:
    """Return the title and the options for a name.

    Raises:
        ConfigError: the name is not a group, method, task or option.
    """
    if (own := spelled_like(name, _GROUPS)) in _GROUPS:
        return own, _group(own)
    if path := NAMES.own_name(name):
        every = [option for group in _GROUPS for option in _group(group)]
        return path, [option for option in every if option.name == path]
    from adapterhub.methods.common.base import METHOD_MEANINGS, described_methods
    from adapterhub.tasks import TASKS
    from adapterhub.tasks.common.base import resolve_alias

    methods = described_methods()
    if method := methods.get(own := spelled_like(name, methods)):
        return method_options(own, method)
    if task := TASKS.get(resolve_alias(name)[0]):
        return task_options(task)
    if meaning := NAMES.meanings.get(name.lower().replace("-", "_")):
        raise ConfigError(f"{name} is not an option", hint=meaning)
    raise unknown(
        "option",
        name,
        [*_GROUPS, *methods, *TASKS, *(o.name for group in _GROUPS for o in _group(group))],
        expected="recipe, teacher, data, train, a method, a task or an option of a recipe",
        hint="adapterhub options, adapterhub methods or adapterhub tasks",
        meaning=METHOD_MEANINGS.get(name.lower().replace("_", "-"), ""),
    )


def _group(name: str) -> list[OptionDoc]:
    prefix, cls = _GROUPS[name]
    return [
        dataclasses.replace(option, name=f"{prefix}{option.name}")
        for option in options_of(cls)
        if not dataclasses.is_dataclass(option.default)
    ]

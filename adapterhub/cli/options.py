"""`adapterhub options`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict

import click

from adapterhub.cli._format import examples, print_json, say_text
from adapterhub.cli._options_text import print_options, task_title
from adapterhub.config.options import OptionDoc, options_of
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, unknown
from adapterhub.recipe.options import TrainOptions
from adapterhub.recipe.recipe import NAMES, REQUIRED, Recipe

_GROUPS: dict[str, tuple[str, type]] = {
    "recipe": ("", Recipe),
    "data": ("data.", DataOptions),
    "train": ("train.", TrainOptions),
}


@click.command(
    "options",
    epilog=examples(
        "adapterhub options                  all options of a recipe",
        "adapterhub options train            how to train",
        "adapterhub options lora             of a method",
        "adapterhub options causal-lm        of a task",
        "adapterhub options lr               of another name: train.learning_rate",
    ),
)
@click.argument("names", nargs=-1, metavar="[recipe | data | train | METHOD | TASK | OPTION]...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(names: tuple[str, ...], as_json: bool) -> None:
    """List the options of recipes, methods and tasks, with values and defaults.

    An option is set in a recipe, or on the command line: train.epochs=10,
    --method 'lora(rank=4)', --task 'causal-lm(pack=true)'.
    """
    found = {title: options for name in names or _GROUPS for title, options in _sections(name)}
    if as_json:
        print_json({title: [asdict(o) for o in found[title]] for title in found}, indent=2)
        return
    for title, options in found.items():
        print_options(options, title, REQUIRED)
    if not names:
        say_text(
            "Those of methods and tasks: adapterhub options METHOD, adapterhub options TASK\n"
            "All of them in a file, to edit: adapterhub recipe > recipe.yaml"
        )


def _sections(name: str) -> list[tuple[str, Sequence[OptionDoc]]]:
    """Return the options that a name stands for, below their titles.

    Raises:
        ConfigError: it is no group, method, task or option.
    """
    if name in _GROUPS:
        return [(name, _group(name))]
    if path := NAMES.own_name(name):
        every = [option for group in _GROUPS for option in _group(group)]
        return [(path, [option for option in every if option.name == path])]
    from adapterhub.methods._described import described_methods
    from adapterhub.methods._other_names import METHOD_MEANINGS
    from adapterhub.tasks import TASKS
    from adapterhub.tasks._registry import resolve_alias

    methods = described_methods()
    if method := methods.get(name):
        rate = OptionDoc(
            "train.learning_rate", "float", method.learning_rate, "the default of this method"
        )
        options = [*options_of(method.options), rate]
        return [(f"{name}: {method.summary}\n{method.paper}\n", options)]
    if task := TASKS.get(resolve_alias(name)[0]):
        return [(task_title(task), options_of(task))]
    if meaning := NAMES.meanings.get(name):
        raise ConfigError(f"{name} is not an option", hint=meaning)
    raise unknown(
        "option",
        name,
        [*_GROUPS, *methods, *TASKS, *(o.name for group in _GROUPS for o in _group(group))],
        expected="recipe, data, train, a method, a task or an option of a recipe",
        hint="adapterhub options, adapterhub methods or adapterhub tasks",
        meaning=METHOD_MEANINGS.get(name, ""),
    )


def _group(name: str) -> list[OptionDoc]:
    prefix, cls = _GROUPS[name]
    return [
        dataclasses.replace(option, name=f"{prefix}{option.name}")
        for option in options_of(cls)
        if not dataclasses.is_dataclass(option.default)
    ]

"""Flags of recipes, for all commands that accept one, and their mapping to options."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from adapterhub.config.options import help_in_words, options_of
from adapterhub.config.user_folders import is_file, is_there
from adapterhub.config.yaml import load_yaml, merge_options, parse_overrides
from adapterhub.data.options import DataOptions
from adapterhub.data.tables import is_data_name
from adapterhub.errors import ConfigError
from adapterhub.recipe.options import TrainOptions
from adapterhub.recipe.recipe import NAMES, SPECS, Recipe

# Section of the help text -> flag -> (option of the recipe, value of the flag). All other options
# are set as KEY=VALUE.
SECTIONS = {
    "What to train": {
        "backbone": ("backbone", "ID"),
        "quantize": ("quantize", "KIND"),
        "family": ("family", "FILE"),
        "method": ("method", "SPEC"),
        "from": ("from", "ADAPTER"),
        "on": ("on", "ADAPTER..."),
        "task": ("task", "SPEC"),
    },
    "Data": {
        "train": ("data.train", "FILE"),
        "eval": ("data.eval", "FILE"),
        "test": ("data.test", "FILE|SHARE"),
        "text": ("data.text", "COLUMN"),
        "pair": ("data.pair", "COLUMN"),
        "label": ("data.label", "COLUMN"),
        "labels": ("data.labels", "NAMES"),
        "group": ("data.group", "COLUMN"),
    },
    "Training": {
        "epochs": ("train.epochs", "N"),
        "steps": ("train.max_steps", "N"),
        "lr": ("train.learning_rate", "RATE"),
        "batch-size": ("train.batch_size", "N"),
        "max-length": ("train.max_length", "N"),
        "seed": ("seed", "N"),
    },
    "Result": {"output": ("output", "DIR"), "name": ("name", "NAME")},
}
FLAGS = {flag: path for flags in SECTIONS.values() for flag, (path, _) in flags.items()}
PARAMETERS = {s: tuple(f.replace("-", "_") for f in flags) for s, flags in SECTIONS.items()}
_STUDIES = ("stages", "bench")
_OF_RECIPES = {"backbone", "method", "task", "tasks", "data", "train", "from", "output", *_STUDIES}
_LISTS = {"method", "new_tokens", "on", "stages"}
_LARGEST_RECIPE = 1 << 16  # bytes; a larger file is data, not a recipe
_OPTIONS = {
    f"{group}{o.name}": o
    for group, cls in (("", Recipe), ("data.", DataOptions), ("train.", TrainOptions))
    for o in options_of(cls)
}
MULTIPLE = frozenset(f for f, path in FLAGS.items() if _OPTIONS[path].type.startswith("list"))


def recipe_flags(function: Any, without: Sequence[str] = ()) -> Any:
    """Add an option for each flag, with the help text and the type of its recipe option.

    `without` are flags to leave out.
    """
    for flags in reversed(SECTIONS.values()):
        for flag, (path, metavar) in reversed(flags.items()):
            if flag in without:
                continue
            option = _OPTIONS[path]
            kind = {"int": int, "float": float}.get(option.type.partition(" ")[0], str)
            said, left_out = help_in_words(option)
            left_out = left_out and str(option.default or left_out)
            default = f"; default: {left_out}" if left_out else ""
            help_text = f"{said[0].upper()}{said[1:]}{default}."
            function = click.option(
                f"--{flag}", type=kind, metavar=metavar, help=help_text, multiple=flag in MULTIPLE
            )(function)
    return function


class RecipeCommand(click.Command):
    """A command with the flags of a recipe; the error for an unknown flag suggests another.

    `sections` maps the titles of the help sections to option names; a last section has the rest.
    """

    def __init__(
        self, *rest: Any, sections: Mapping[str, tuple[str, ...]] = PARAMETERS, **others: Any
    ) -> None:
        super().__init__(*rest, **others)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their sections."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        records = {o.name: o.get_help_record(ctx) or ("", "") for o in options}
        width = max(len(name) for name, _ in records.values())
        rest = tuple(n for n in records if not any(n in names for names in self.sections.values()))
        for title, names in (*self.sections.items(), ("Other options", rest)):
            lines = [(records[n][0].ljust(width), records[n][1]) for n in names if n]
            with formatter.section(title):
                formatter.write_dl(lines)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, but `--on A B` is `--on A --on B`; an unknown flag has a hint."""
        try:
            return super().parse_args(ctx, list(_one_value_each(args)))
        except click.NoSuchOption as error:
            flag = error.option_name
            name = flag.lstrip("-").replace("-", "_")
            if path := NAMES.own_name(name):
                own = next((f"--{f} VALUE" for f in FLAGS if FLAGS[f] == path), f"{path}=VALUE")
                raise click.UsageError(f"no such flag: {flag}; type {own}", ctx) from error
            if meaning := NAMES.meanings.get(name):
                raise click.UsageError(f"no such flag: {flag}; try {meaning}", ctx) from error
            raise


def _one_value_each(args: Sequence[str]) -> Iterator[str]:
    """Repeat a flag with several values before each value.

    The values end at the next flag, KEY=VALUE or recipe.
    """
    flag = None
    args = [re.sub(r"^--data(?==|$)", "--train", arg) for arg in args]
    for number, arg in enumerate(args):
        if arg.startswith("-") or is_override(arg) or arg.endswith((".yaml", ".yml")):
            flag = arg if arg.removeprefix("--") in MULTIPLE else None
        elif flag is not None and args[number - 1] != flag:
            yield flag
        yield arg


def is_override(word: str) -> bool:
    """Return whether a word is KEY=VALUE, not a path that contains a `=`.

    Folders of sweeps and of partitioned tables contain one: `runs/lr=1e-3`, `year=2024/part.csv`.
    """
    key, equals, _ = word.partition("=")
    if not equals or is_there(word) or any(mark in key for mark in "/\\~"):
        return False
    is_option = "." in key or key in _OF_RECIPES or NAMES.own_name(key.strip()) is not None
    return is_option or not is_data_name(word)


def recipe_words(words: tuple[str, ...], flags: dict[str, Any]) -> tuple[str | None, list[str]]:
    """Split the arguments into the optional recipe file and the overrides.

    A data file among the arguments becomes the flag `train`.

    Raises:
        ConfigError: there are several recipes, or several files of training data.
    """
    overrides = [word for word in words if is_override(word)]
    files = [word for word in words if word not in overrides]
    recipes = [word for word in files if is_recipe(word)]
    named = [flags["train"]] if flags["train"] else []
    data = list(dict.fromkeys([word for word in files if word not in recipes] + named))
    for kind, each in (("recipe", recipes), ("file of training data", data)):
        if len(each) > 1:
            raise ConfigError(
                f"more than one {kind}: {', '.join(each)}",
                expected="one recipe, one file of training data, and options as KEY=VALUE",
                hint=f"--eval {each[1]}" if each is data else "",
            )
    flags["train"] = data[0] if data else None
    return (recipes[0] if recipes else None), overrides


def is_recipe(file: str) -> bool:
    """Return whether a file is a recipe or study, not data: by its suffix, or by its content.

    A word that is neither a file nor looks like a data source counts as a mistyped name.
    """
    path = Path(file)
    if file.lower().endswith((".yaml", ".yml")):
        return True
    if not is_there(path):
        return not path.suffix and not any(mark in file for mark in "/:")
    if not is_file(path) or path.stat().st_size > _LARGEST_RECIPE:
        return False
    try:
        options = load_yaml(path)
    except ConfigError:
        return False
    # Data may also be an object: of columns, or with a list of rows, {"data": [...]}.
    known = all(name in _STUDIES or NAMES.own_name(name) for name in options)
    lists = {name for name, value in options.items() if isinstance(value, list)}
    return known and bool(options.keys() & _OF_RECIPES) and lists <= _LISTS


def nested_flags(flags: dict[str, Any]) -> dict[str, Any]:
    """Build the nested options of a recipe from the flags that are set."""
    data: dict[str, Any] = {}
    for flag, value in flags.items():
        if value not in (None, ()):
            *above, name = FLAGS[flag.replace("_", "-")].split(".")
            # A spec may be a YAML list or mapping; a column named 1 stays a string.
            leaf = parse_overrides([f"{name}={value}"]) if flag in SPECS else {name: value}
            data = merge_options(data, {above[0]: leaf} if above else leaf)
    return data

"""The flags of a recipe, for all commands that take one, and how they become its options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from adapterhub.config.options import options_of
from adapterhub.config.yaml import merge_options, parse_overrides
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError
from adapterhub.recipe.options import TrainOptions
from adapterhub.recipe.recipe import NAMES, SPECS, Recipe

# Section of the help text -> flag -> (option of the recipe, what the flag takes). All other options
# are given as KEY=VALUE.
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
        "text": ("data.text", "COLUMN"),
        "pair": ("data.pair", "COLUMN"),
        "label": ("data.label", "COLUMN"),
        "labels": ("data.labels", "NAMES"),
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
_OPTIONS = {
    f"{group}{o.name}": o
    for group, cls in (("", Recipe), ("data.", DataOptions), ("train.", TrainOptions))
    for o in options_of(cls)
}
MULTIPLE = frozenset(f for f, path in FLAGS.items() if _OPTIONS[path].type.startswith("list"))


def recipe_flags(function: Any, without: Sequence[str] = ()) -> Any:
    """Add an option for each flag, with the help text and the type of its recipe option.

    `without` are flags that are left out.
    """
    for flags in reversed(SECTIONS.values()):
        for flag, (path, metavar) in reversed(flags.items()):
            if flag in without:
                continue
            option = _OPTIONS[path]
            kind = {"int": int, "float": float}.get(option.type.partition(" ")[0], str)
            help_text = f"{option.help[0].upper()}{option.help[1:]}."
            function = click.option(
                f"--{flag}", type=kind, metavar=metavar, help=help_text, multiple=flag in MULTIPLE
            )(function)
    return function


class RecipeCommand(click.Command):
    """A command with the flags of a recipe; for an unknown flag it says what to type instead.

    `sections` are the titles below which its options are listed, each with their names; a last
    section has the others.
    """

    def __init__(
        self, *rest: Any, sections: Mapping[str, tuple[str, ...]] = PARAMETERS, **others: Any
    ) -> None:
        super().__init__(*rest, **others)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections."""
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
    """Repeat a flag that takes several values before each of them.

    The values end at a flag, a KEY=VALUE or a recipe.
    """
    flag = None
    for number, arg in enumerate(args):
        if arg.startswith("-") or "=" in arg or arg.endswith((".yaml", ".yml")):
            flag = arg if arg.removeprefix("--") in MULTIPLE else None
        elif flag is not None and args[number - 1] != flag:
            yield flag
        yield arg


def recipe_words(words: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """Split the arguments into the recipe file, if there is one, and the overrides.

    Raises:
        ConfigError: more than one file.
    """
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(
            f"more than one recipe: {', '.join(files)}",
            expected="one file, and options as KEY=VALUE without spaces",
        )
    return (files[0] if files else None), [word for word in words if "=" in word]


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

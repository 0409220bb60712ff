"""The command line: every command with its help, usage, options and examples, from click."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from adapterhub.cli import ALIASES, COMMANDS, HEADINGS, group
from adapterhub.cli.train import RecipeCommand
from reference.markdown import code, entry, prose

PAGE = "reference/cli.md"
_INTRO = """\
# Command line

`adapterhub --help` lists the commands, and `adapterhub COMMAND --help` prints what is below.
Results go to standard output; progress, notes and errors go to standard error. With `--json` a
result is JSON. The exit code is 0, or 2 after an error, which says what to do
([troubleshooting](../troubleshooting.md)). `verify`, `export --check` and `registry verify` exit
with 1 if what they check is not so.
"""


def pages() -> dict[str, str]:
    """Return the page."""
    return {PAGE: "\n".join(_page())}


def _page() -> Iterator[str]:
    yield _INTRO
    for heading, names in HEADINGS.items():
        yield f"**{heading}**\n"
        yield "".join(f"- [`{name}`](#{name}): {prose(COMMANDS[name])}\n" for name in names)
    context = click.Context(group, info_name="adapterhub", **group.context_settings)
    for heading, names in HEADINGS.items():
        yield f"## {heading}\n"
        for name in names:
            command = group.get_command(context, name)
            assert command is not None, name
            yield from _command(command, click.Context(command, context, info_name=name))


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the parts of a command, and of those below it."""
    words = context.command_path.split()[1:]
    anchor = "-".join(words)
    yield f"{'#' * (2 + len(words))} {' '.join(words)} {{: #{anchor} }}\n"
    if others := [other for other, name in ALIASES.items() if [name] == words]:
        yield f"Also called {', '.join(map(code, others))}.\n"
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"```text\n{usage}\n```\n"
    yield prose(inspect.cleandoc(command.help or "").replace("\b\n", ""), PAGE) + "\n"
    yield from _options(command, context, anchor)
    if examples := _examples(command.epilog or ""):
        yield f"**Examples**\n\n```sh\n{examples}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.commands[name]
            yield from _command(inner, click.Context(inner, context, info_name=name))


def _options(command: click.Command, context: click.Context, anchor: str) -> Iterator[str]:
    """Yield the options, under the titles of their sections if there are some."""
    options = {
        str(option.name): option
        for option in command.get_params(context)
        if isinstance(option, click.Option) and "--help" not in option.opts
    }
    sections = command.sections if isinstance(command, RecipeCommand) else {}
    inside = {name for names in sections.values() for name in names}
    rest = tuple(name for name in options if name not in inside)
    for title, names in (*sections.items(), ("Other options" if sections else "Options", rest)):
        if names:
            yield f"**{title}**\n"
        for name in names:
            term, text = options[name].get_help_record(context) or ("", "")
            yield entry(term, f"{anchor}{options[name].opts[-1]}", prose(text, PAGE))


def _examples(epilog: str) -> str:
    """Return the examples of a help text, without their indent."""
    block = re.search(r"^Examples:\n((?:  .*\n?)+)", epilog, re.MULTILINE)
    return inspect.cleandoc(block[1]) if block else ""

"""The `adapterhub` command. A subcommand's file is imported when it runs, so that `--help` needs no
torch."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import NoReturn

import click

from adapterhub._version import __version__
from adapterhub.errors import AdapterhubError, did_you_mean, printable

COMMANDS = {
    "train": "Train an adapter, from a recipe or from flags.",
    "eval": "Evaluate an adapter on labelled data.",
    "predict": "Predict with an adapter, on arguments, a file or standard input.",
    "publish": "Publish an adapter to a local registry.",
    "push": "Push an adapter to the Hub, or a hub of your own.",
    "pull": "Get the verified files of a published adapter.",
    "list": "List published adapters, or search them.",
    "show": "Show an adapter: its versions, card and manifest.",
    "yank": "Take a version out of searches.",
    "lock": "Pin the adapters that a project uses.",
    "sync": "Restore the adapters of a project's lock file.",
    "registry": "Look after a local registry.",
    "merge": "Merge an adapter into its backbone, and write a plain checkpoint.",
    "combine": "Combine adapters into a new one: add, average, subtract, TIES, DARE.",
    "import": "Import an adapter of another library, such as peft.",
    "export": "Export an adapter to peft, or check before training whether it can be.",
    "methods": "List the methods, with their papers.",
    "tasks": "List the tasks, with their options.",
    "inspect": "Show a backbone's anatomy, and which methods fit it.",
    "quickstart": "Train, evaluate and use an adapter on text that every machine has.",
}

ALIASES = {"search": "list"}


class LazyGroup(click.Group):
    """Knows its subcommands by name and help; imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The subcommands, in the order of the work."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The subcommand of a name; its module is `cli/<name>.py`, its function `command`."""
        name = ALIASES.get(name, name)
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"adapterhub.cli.{name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with the nearest name for a mistyped one."""
        if args and not args[0].startswith("-") and args[0] not in {*COMMANDS, *ALIASES}:
            raise click.UsageError(
                f"no command is called {args[0]!r}{did_you_mean(args[0], COMMANDS)}"
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of subcommands, from COMMANDS alone."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="adapterhub")
def group() -> None:
    """Parameter-efficient fine-tuning of transformers: every method, on every backbone."""


def main() -> None:
    """Run the command line. An error is one message, without a traceback; its exit code is 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.formatwarning = _note
    try:
        group(prog_name="adapterhub")
    except AdapterhubError as error:
        _fail(str(error))
    except OSError as error:  # a full disk, a lost mount: no defect of ours, no traceback
        _fail(printable(f"{error.filename or 'a file'}: {error.strerror or error}"))


def _note(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """A warning as a user reads it, without the line of code that gave it."""
    return f"{'note' if category is UserWarning else category.__name__}: {message}\n"


def _fail(message: str) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(2)

"""The `adapterhub` command.

Each subcommand is one module, imported only when it runs: `adapterhub --help` does not load torch.
What Python users need too belongs in the rooms above.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import re
import sys
import traceback
import warnings
from types import TracebackType
from typing import NoReturn

import click

from adapterhub._version import __version__
from adapterhub.cli._examples import EXAMPLES, SEE_ALSO
from adapterhub.errors import AdapterhubError, ConfigError, did_you_mean, one_line, printable
from adapterhub.status import display_for_terminal, showing

COMMANDS = {
    "train": "Train an adapter from a recipe or from flags.",
    "eval": "Evaluate an adapter, or an untrained backbone.",
    "bench": "Compare methods on your data: tuned, repeated, tested.",
    "suggest": "Find the trained adapter to start from for your data.",
    "report": "Write the page of a run: curves, scores, mistakes.",
    "compare": "Compare runs, and say whether a difference is chance.",
    "predict": "Predict on arguments, a file or standard input.",
    "publish": "Publish an adapter to a local registry.",
    "push": "Push an adapter to the Hugging Face Hub or your own hub.",
    "pull": "Fetch the files of a published adapter and verify them.",
    "list": "List or search published adapters.",
    "show": "Show an adapter's versions, card and manifest.",
    "key": "Create a key pair for signatures, or show its public key.",
    "sign": "Sign an adapter with a private key.",
    "verify": "Show who signed an adapter, and whether you trust them.",
    "trust": "List, add or remove the keys that you trust.",
    "diff": "Compare two adapters: settings, scores and tensors.",
    "tag": "Name a published version, or list such names.",
    "yank": "Withdraw a published version, without deleting it.",
    "delete": "Delete a version from a local registry.",
    "lock": "Pin the adapters of a project in its lock file.",
    "sync": "Restore the adapters pinned in the lock file.",
    "login": "Store an access token for a hub.",
    "logout": "Delete the access token of a hub.",
    "registry": "Verify, re-index or clean a local registry.",
    "merge": "Merge an adapter into its backbone and write a checkpoint.",
    "combine": "Combine adapters into one: linear, TIES or DARE.",
    "import": "Import an adapter of another library, such as peft.",
    "export": "Export an adapter to peft, or check that it can be exported.",
    "recipe": "Print a recipe with every option, each with a comment.",
    "options": "List the options of recipes, methods and tasks.",
    "methods": "List the methods, or show the options of one.",
    "tasks": "List the tasks, or show the options of one.",
    "inspect": "Show the sites of a backbone and the methods that fit it.",
    "quickstart": "Train, evaluate and use an adapter on built-in text.",
}

HEADINGS = {
    "Train and use": (
        "quickstart",
        "train",
        "bench",
        "suggest",
        "report",
        "compare",
        "eval",
        "predict",
    ),
    "Change adapters": ("merge", "combine"),
    "Look up": ("recipe", "options", "methods", "tasks", "inspect"),
    "Share": ("publish", "list", "show", "diff", "tag", "yank", "delete", "registry"),
    "Share on a hub": ("push", "pull", "login", "logout"),
    "Other libraries": ("import", "export"),
    "Pin and sign": ("lock", "sync", "key", "sign", "verify", "trust"),
}
ALIASES = {"search": "list"}


class LazyGroup(click.Group):
    """A click group that lists its subcommands from COMMANDS and imports them only to run them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the subcommands in the order of a typical workflow."""
        return [*COMMANDS]  # here `list` is the module cli/list.py, once that is imported

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import the subcommand `name`: the function `command` of `cli/<name>.py`."""
        name = ALIASES.get(name, name)
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"adapterhub.cli.{name}")
        command: click.Command = module.command
        if command.epilog is None and name in EXAMPLES:
            command.epilog = "\n".join(["\b", "Examples:", *(f"  {x}" for x in EXAMPLES[name])])
        see_also = f"See also: {SEE_ALSO[name]}."
        if see_also not in (command.epilog or ""):
            command.epilog = f"{command.epilog}\n\n{see_also}" if command.epilog else see_also
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a subcommand as click does, but suggest the nearest name for a mistyped one."""
        if args and not args[0].startswith("-") and args[0] not in {*COMMANDS, *ALIASES}:
            raise click.UsageError(f"unknown command {args[0]!r}{did_you_mean(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the subcommand; what click's errors quote from the command line is printable."""
        try:
            with showing(display_for_terminal(stages=False)):
                return super().invoke(ctx)
        except click.ClickException as error:
            quoted = printable(error.message).replace("\n", "\n    ")
            vars(error)["message"] = quoted  # final by its annotation
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the subcommands under their headings, without importing their modules."""
        width = max(map(len, COMMANDS))
        for title, names in HEADINGS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), COMMANDS[name]) for name in names])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`adapterhub COMMAND --help` has the options and examples of one. New here: "
    "`adapterhub quickstart`.",
)
@click.version_option(__version__, prog_name="adapterhub")
def group() -> None:
    """Parameter-efficient fine-tuning of transformers: train, use, share and merge adapters."""


# What libraries read when they are imported. tokenizers uses all cores, and warns at a subprocess
# started later unless the variable is set. torch keeps compiled products of 1,024 shapes in each
# of two caches; batches have many lengths, and 64 take a third less memory in bf16, as fast.
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "true",
    "LRU_CACHE_CAPACITY": "64",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}


def main() -> None:
    """Run the command line; on an expected error print one message and exit with code 2."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _make_output_printable()
    try:
        _refuse_undecodable(sys.argv[1:])
        group(prog_name="adapterhub")
    except AdapterhubError as error:
        _fail(str(error))
    except OSError as error:  # a full disk, a lost mount: not a bug, so no traceback
        _fail(one_line(f"{error.filename or 'a file'}: {error.strerror or error}"))


class _PrintableRecord(logging.LogRecord):
    """A log record whose message is printable: libraries log texts of hubs and files."""

    def getMessage(self) -> str:
        return printable(super().getMessage())


def _make_output_printable() -> None:
    """Escape what others wrote in warnings, logs and tracebacks, and what a stream cannot encode.

    The commands' own output is escaped by `_format`, errors by `AdapterhubError`.
    """
    warnings.formatwarning = _warning_line
    logging.setLogRecordFactory(_PrintableRecord)
    sys.excepthook = _print_traceback
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an unexpected exception as Python does, but printable."""
    sys.stderr.write(printable("".join(traceback.format_exception(kind, error, trace))))


def _refuse_undecodable(words: list[str]) -> None:
    """Refuse arguments that are not in the encoding of the terminal: Python hides their bytes."""
    for number, word in enumerate(words, start=1):
        if lone := re.search("[\ud800-\udfff]", word):
            byte = ord(lone.group()) - 0xDC00
            raise ConfigError(
                f"argument {number} is not {sys.getfilesystemencoding().upper()} text: byte "
                f"0x{byte & 0xFF:02x} at character {lone.start() + 1}",
                expected="text in the encoding of the terminal",
                hint="pipe texts through iconv -f LATIN1 -t UTF-8; rename files with other names",
            )


def _warning_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Format a warning for users, without the line of code that raised it."""
    text = printable(str(message)).replace("\n", "\n    ")
    return f"{'note' if category is UserWarning else category.__name__}: {text}\n"


def _fail(message: str) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(2)

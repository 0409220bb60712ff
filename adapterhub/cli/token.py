"""`adapterhub token create|list|revoke`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from adapterhub.cli._format import print_json, print_result, print_table, say
from adapterhub.cli._options import as_json_option
from adapterhub.errors import ConfigError
from adapterhub.files.shown_table import ShownTable

if TYPE_CHECKING:
    from adapterhub.web.tokens import TokenFile

_file_option = click.option("--file", metavar="FILE", help="File of tokens, if not your own.")


@click.group("token")
def command() -> None:
    """Create, list or revoke the tokens that clients of your server have."""


@command.command()
@click.argument("name")
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(["predict", "admin"]),
    default=("predict",),
    show_default=True,
    help="A permission; repeatable.",
)
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    default=("*",),
    show_default=True,
    metavar="PATTERN",
    help="Adapters it may use: 'team-*'; repeatable.",
)
@click.option("--expires", metavar="TIME", help="Validity: 90d, 12h.")
@_file_option
@as_json_option
def create(
    name: str,
    roles: tuple[str, ...],
    adapters: tuple[str, ...],
    expires: str | None,
    file: str | None,
    as_json: bool,
) -> None:
    """Create a token for NAME, and print it: it is not kept, only its digest."""
    from adapterhub.config.yaml import seconds_of

    seconds = None if expires is None else seconds_of(expires)
    if expires is not None and seconds is None:
        raise ConfigError(f"--expires {expires!r} is not a time", expected="such as 90d or 12h")
    token = _tokens(file).create(name, roles, adapters, seconds)
    print_result(token, {"name": name, "token": token}, as_json=as_json)


@command.command("list")
@_file_option
@as_json_option
def list_tokens(file: str | None, as_json: bool) -> None:
    """List the tokens, without the tokens themselves."""
    tokens = _tokens(file).tokens()
    if as_json:
        print_json([{k: v for k, v in asdict(t).items() if k != "sha256"} for t in tokens])
        return
    if not tokens:
        say("no tokens")
        return
    columns = ("name", "roles", "adapters", "created", "expires", "last used")
    rows = [
        (each.name, ", ".join(each.roles), ", ".join(each.adapters), each.created or "",
         each.expires or "", each.used or "")
        for each in tokens
    ]  # fmt: skip
    print_table(ShownTable(columns, rows), optional=("created",))


@command.command()
@click.argument("name")
@_file_option
@as_json_option
def revoke(name: str, file: str | None, as_json: bool) -> None:
    """Remove the token of NAME; servers that run refuse it within seconds."""
    _tokens(file).revoke(name)
    print_result(f"revoked the token of {name}", {"revoked": name}, as_json=as_json)


def _tokens(file: str | None) -> TokenFile:
    from adapterhub.web.tokens import TokenFile, default_token_file

    return TokenFile(Path(file) if file else default_token_file())

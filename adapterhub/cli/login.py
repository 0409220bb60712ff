"""`adapterhub login`."""

from __future__ import annotations

import sys

import click

from adapterhub.cli._format import say


@click.command("login")
@click.argument("url")
@click.option("--unchecked", is_flag=True, help="Do not check the token with the hub.")
def command(url: str, unchecked: bool) -> None:
    """Store an access token for the hub at URL, https://HOST.

    The token is read from standard input, or from a hidden prompt, and is checked with the hub, if
    that can be reached. It is sent to this hub only. For the Hugging Face Hub, hf auth login or
    HF_TOKEN do as well.
    """
    from adapterhub.registry.hub_client import UnreachableError
    from adapterhub.registry.tokens import check_token, login

    if sys.stdin.isatty():
        token = click.prompt("token", hide_input=True)
    else:
        token = sys.stdin.buffer.read(8192).decode("ascii", "replace")
    problem = ""
    if not unchecked:
        try:
            check_token(url, token.strip())
        except UnreachableError as error:
            problem = error.problem
    say(f"stored a token for {login(url, token.strip())}")
    if problem:
        say(f"the token was not checked: {problem}", err=True)

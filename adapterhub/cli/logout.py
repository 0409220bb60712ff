"""`adapterhub logout`."""

from __future__ import annotations

import click

from adapterhub.cli._format import say


@click.command("logout")
@click.argument("url")
def command(url: str) -> None:
    """Delete the access token that was stored for the hub at URL."""
    from adapterhub.registry.tokens import logout

    say(f"deleted the token for {logout(url)}")

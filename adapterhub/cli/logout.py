"""`adapterhub logout`."""

from __future__ import annotations

import click


@click.command("logout")
@click.argument("url")
def command(url: str) -> None:
    """Delete the access token that was stored for the hub at URL."""
    from adapterhub.registry.tokens import logout

    click.echo(f"deleted the token for {logout(url)}")

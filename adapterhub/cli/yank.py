"""`adapterhub yank`."""

from __future__ import annotations

import click


@click.command("yank")
@click.argument("reference")
@click.option("--reason", required=True, help="Why: who pinned this version reads it.")
@click.option("--registry", help="A registry's folder (none: the user's own).")
def command(reference: str, reason: str, registry: str | None) -> None:
    """Take one version (NAME@VERSION) out of searches and of what the bare NAME means.

    Its files stay: who pinned it gets it still.
    """
    from adapterhub.registry.verbs import yank

    entry = yank(reference, reason, registry=registry)
    click.echo(f"{entry.reference} is yanked: {reason}")

"""`adapterhub yank`."""

from __future__ import annotations

from dataclasses import asdict, replace

import click

from adapterhub.cli._publishing import as_json_option, print_json


@click.command("yank")
@click.argument("reference")
@click.option("--reason", required=True, help="Why: who pinned this version reads it.")
@click.option("--registry", help="A registry's folder (none: the user's own).")
@as_json_option
def command(reference: str, reason: str, registry: str | None, as_json: bool) -> None:
    """Take one version (NAME@VERSION) out of searches and of what the bare NAME means.

    Its files stay: who pinned it gets it still.
    """
    from adapterhub.registry.yank import yank

    entry = yank(reference, reason, registry=registry)
    if as_json:
        print_json(asdict(replace(entry, yanked=reason)))
    else:
        click.echo(f"{entry.reference} is yanked: {reason}")

"""`adapterhub yank`."""

from __future__ import annotations

from dataclasses import asdict, replace

import click

from adapterhub.cli._format import print_result
from adapterhub.cli._options import as_json_option, registry_option


@click.command("yank")
@click.argument("reference")
@click.option("--reason", required=True, help="Reason, shown to users who pinned this version.")
@registry_option
@as_json_option
def command(reference: str, reason: str, registry: str | None, as_json: bool) -> None:
    """Withdraw a published version, NAME@VERSION, without deleting it.

    Searches and the bare NAME skip it from now on. NAME@VERSION still loads, with a warning.
    """
    from adapterhub.registry.tag_yank_delete import yank

    entry = yank(reference, reason, registry=registry)
    facts = asdict(replace(entry, yanked=reason))
    print_result(f"yanked {entry.reference}: {reason}", facts, as_json=as_json)

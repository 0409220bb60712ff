"""`adapterhub show`."""

from __future__ import annotations

import json

import click

from adapterhub.cli._format import print_json, print_table, say_text
from adapterhub.cli._publishing import backbone_option, registry_option, require_signature_option


@click.command("show")
@click.argument("reference")
@backbone_option
@registry_option
@require_signature_option
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def command(reference: str, backbone: str | None, registry: str | None, as_json: bool) -> None:
    """Show the versions of an adapter and the card of the one REFERENCE names."""
    from adapterhub.cli.list import OPTIONAL_COLUMNS, entries_table
    from adapterhub.files.card import split_card
    from adapterhub.files.manifest import to_json
    from adapterhub.files.native import read_card, read_manifest
    from adapterhub.registry.pull import pull
    from adapterhub.registry.stores import read_reference, store_of

    folder = pull(reference, backbone=backbone, registry=registry)
    if as_json:
        manifest = json.loads(to_json(read_manifest(folder)))
        print_json(manifest, indent=2)
        return
    parsed = read_reference(reference, registry)
    if parsed.kind != "folder":
        versions = store_of(parsed, registry).versions(parsed.name, backbone=backbone)
        print_table(entries_table(list(versions)), OPTIONAL_COLUMNS)
    if text := read_card(folder):
        _, text = split_card(text)
        # Indented, so that no line of a stranger's card passes for one of this program.
        say_text("\n".join(f"  {line}" for line in _without_comments(text).strip().split("\n")))


def _without_comments(text: str) -> str:
    """Remove HTML comments, in one pass: a hostile card may open very many."""
    first, *parts = text.split("<!--")
    for part in parts:
        comment, end, rest = part.partition("-->")
        first += rest.lstrip("\n") if end else f"<!--{comment}"
    return first

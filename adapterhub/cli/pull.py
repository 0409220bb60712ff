"""`adapterhub pull`."""

from __future__ import annotations

import click


@click.command("pull")
@click.argument("reference")
@click.option("--to", "folder", help="A new folder for the files (none: the store's own).")
@click.option("--backbone", help="Only the adapter of this backbone: its id, or fingerprint.")
@click.option("--registry", help="A registry's folder (none: the user's own).")
def command(reference: str, folder: str | None, backbone: str | None, registry: str | None) -> None:
    """Get the files of an adapter, verified: NAME[@VERSION], hf:OWNER/NAME[@REVISION], or
    https://HOST/OWNER/NAME."""
    from adapterhub.registry.verbs import pull

    click.echo(pull(reference, folder, backbone=backbone, registry=registry))

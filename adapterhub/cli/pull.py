"""`adapterhub pull`."""

from __future__ import annotations

import click

from adapterhub.cli._publishing import as_json_option, print_json


@click.command("pull")
@click.argument("reference")
@click.option("--to", "folder", help="A new folder for the files (none: the store's own).")
@click.option("--backbone", help="Only the adapter of this backbone: its id, or fingerprint.")
@click.option("--registry", help="A registry's folder (none: the user's own).")
@click.option("--allow-pickle", is_flag=True, help="Take other libraries' pickles; no code runs.")
@as_json_option
def command(
    reference: str,
    folder: str | None,
    backbone: str | None,
    registry: str | None,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Get the files of an adapter, verified, and print where they are: NAME[@VERSION],
    hf:OWNER/NAME[@REVISION], or https://HOST/OWNER/NAME."""
    from adapterhub.registry.pull import pull

    options = {"backbone": backbone, "registry": registry}
    place = pull(reference, folder, **options, allow_pickle=allow_pickle)
    if as_json:
        print_json({"folder": str(place), "reference": reference})
    else:
        click.echo(place)

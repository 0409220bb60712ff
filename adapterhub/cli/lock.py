"""`adapterhub lock`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from adapterhub.cli._publishing import as_json_option, print_json


@click.command("lock")
@click.argument("references", nargs=-1, required=True, metavar="REFERENCE...")
@click.option("--file", default="adapterhub.lock", show_default=True, help="The lock file.")
@click.option("--name", help="What the project calls it, if not by its own name.")
@click.option("--registry", help="A registry's folder (none: the user's own).")
@as_json_option
def command(
    references: tuple[str, ...], file: str, name: str | None, registry: str | None, as_json: bool
) -> None:
    """Pin what each REFERENCE means now in the project's lock file, by version and sha256.

    `adapterhub sync` restores exactly these.
    """
    from adapterhub.registry.lockfile import pin, read_lock, with_pins, write_lock

    if name and len(references) > 1:
        raise click.UsageError("--name is for one REFERENCE")
    pins = read_lock(Path(file))
    new = [pin(reference, registry, name=name) for reference in references]
    write_lock(Path(file), with_pins(pins, new))
    if as_json:
        print_json({own: asdict(pinned) for own, pinned in new})
        return
    for own, pinned in new:
        click.echo(f"{own} = {pinned.reference}, sha256 {pinned.digest[:12]}")

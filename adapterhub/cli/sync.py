"""`adapterhub sync`."""

from __future__ import annotations

from pathlib import Path

import click

from adapterhub.cli._publishing import as_json_option, print_json
from adapterhub.errors import FileError


@click.command("sync")
@click.option("--file", default="adapterhub.lock", show_default=True, help="The lock file.")
@click.option("--to", "folder", default="adapters", show_default=True, help="Where they are put.")
@click.option("--registry", help="A registry's folder (none: the user's own).")
@as_json_option
def command(file: str, folder: str, registry: str | None, as_json: bool) -> None:
    """Restore the adapters of the project's lock file, exactly, one folder each."""
    from adapterhub.registry.lockfile import read_lock, sync

    pins = read_lock(Path(file))
    if not pins:
        raise FileError(f"{file} pins nothing", hint="adapterhub lock REFERENCE...")
    restored = sync(pins, Path(folder), registry)
    kept = sorted(pins.keys() - set(restored))
    if as_json:
        print_json({"folder": folder, "restored": restored, "there": kept})
    else:
        click.echo(f"{folder}: {len(restored)} restored, {len(kept)} were there")

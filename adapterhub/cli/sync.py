"""`adapterhub sync`."""

from __future__ import annotations

from pathlib import Path

import click

from adapterhub.errors import FileError


@click.command("sync")
@click.option("--file", default="adapterhub.lock", show_default=True, help="The lock file.")
@click.option("--to", "folder", default="adapters", show_default=True, help="Where they are put.")
@click.option("--registry", help="A registry's folder (none: the user's own).")
def command(file: str, folder: str, registry: str | None) -> None:
    """Restore the adapters of the project's lock file, exactly, one folder each."""
    from adapterhub.registry.lockfile import read_lock, sync

    pins = read_lock(Path(file))
    if not pins:
        raise FileError(f"{file} pins nothing", hint="adapterhub lock REFERENCE...")
    restored = sync(pins, Path(folder), registry)
    click.echo(f"{folder}: {len(restored)} restored, {len(pins) - len(restored)} were there")

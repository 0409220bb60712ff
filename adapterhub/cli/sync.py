"""`adapterhub sync`."""

from __future__ import annotations

from pathlib import Path

import click

from adapterhub.cli._format import print_json, say
from adapterhub.cli._publishing import (
    as_json_option,
    registry_option,
    require_signature_option,
)
from adapterhub.errors import FileError


@click.command("sync")
@click.option("--file", default="adapterhub.lock", show_default=True, help="Lock file.")
@click.option(
    "--to", "folder", default="adapters", show_default=True, help="Folder for the adapters."
)
@registry_option
@require_signature_option
@as_json_option
def command(file: str, folder: str, registry: str | None, as_json: bool) -> None:
    """Restore the adapters pinned in the lock file, one folder each."""
    from adapterhub.registry.lockfile import read_lock, sync

    pins = read_lock(Path(file))
    if not pins:
        raise FileError(f"{file} pins no adapter", hint="adapterhub lock REFERENCE...")
    restored = sync(pins, Path(folder), registry, project=Path(file).parent)
    present = sorted(pins.keys() - set(restored))
    if as_json:
        print_json({"folder": folder, "restored": restored, "there": present})
    else:
        say(f"{folder}: {len(restored)} restored, {len(present)} already present")

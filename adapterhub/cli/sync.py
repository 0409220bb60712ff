"""`adapterhub sync`."""

from __future__ import annotations

from pathlib import Path

import click

from adapterhub.cli._format import print_result
from adapterhub.cli._options import (
    as_json_option,
    lock_file_option,
    registry_option,
    require_signature_option,
)
from adapterhub.errors import FileError


@click.command("sync")
@lock_file_option
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
    print_result(
        f"{folder}: {len(restored)} restored, {len(present)} already present",
        {"folder": folder, "restored": restored, "there": present},
        as_json=as_json,
    )

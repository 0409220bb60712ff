"""`adapterhub lock`."""

from __future__ import annotations

from pathlib import Path

import click

from adapterhub.cli._format import print_json, say
from adapterhub.cli._options import (
    as_json_option,
    lock_file_option,
    registry_option,
    require_signature_option,
)


@click.command("lock")
@click.argument("references", nargs=-1, required=True, metavar="REFERENCE...")
@lock_file_option
@click.option("--name", help="Name in the lock file, if not the adapter's own.")
@registry_option
@require_signature_option
@as_json_option
def command(
    references: tuple[str, ...], file: str, name: str | None, registry: str | None, as_json: bool
) -> None:
    """Pin the adapters of a project in its lock file, by version, sha256 and signer.

    `adapterhub sync` restores exactly the pinned files. An adapter that was signed when it was
    locked stays with its signer.
    """
    from adapterhub.files.signature import PublicKey
    from adapterhub.registry.lockfile import pin, read_lock, with_pins, write_lock

    if name and len(references) > 1:
        raise click.UsageError("--name takes a single REFERENCE")
    pins = read_lock(Path(file))
    project = Path(file).parent
    new = [pin(r, registry, name=name, project=project, before=pins) for r in references]
    write_lock(Path(file), with_pins(pins, new))
    if as_json:
        print_json({key: pinned.record() for key, pinned in new})
        return
    for key, pinned in new:
        source = f" in {pinned.registry}" * (pinned.registry is not None)
        signer = f", signed by key {PublicKey(pinned.signer).id}" if pinned.signer else ""
        say(f"{key} = {pinned.reference}{source}, sha256 {pinned.digest[:12]}{signer}")
        for below in pinned.on:
            say(f"  on {below.reference}, sha256 {below.digest[:12]}")

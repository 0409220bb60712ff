"""`adapterhub lock`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from adapterhub.cli.publishing import as_json_option, print_json


@click.command("lock")
@click.argument("references", nargs=-1, required=True, metavar="REFERENCE...")
@click.option("--file", default="adapterhub.lock", show_default=True, help="The lock file.")
@click.option("--registry", help="A registry's folder (none: the user's own).")
@as_json_option
def command(references: tuple[str, ...], file: str, registry: str | None, as_json: bool) -> None:
    """Pin what each REFERENCE means now in the project's lock file, by version and sha256.

    `adapterhub sync` restores exactly these.
    """
    from adapterhub.registry.lockfile import pin, read_lock, write_lock

    pins = read_lock(Path(file))
    now = dict(pin(reference, registry) for reference in references)
    write_lock(Path(file), pins | now)
    if as_json:
        print_json({name: asdict(pinned) for name, pinned in now.items()})
        return
    for name, pinned in now.items():
        click.echo(f"{name} = {pinned.reference}, sha256 {pinned.digest[:12]}")

"""`adapterhub lock`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("lock")
@click.argument("references", nargs=-1, required=True, metavar="REFERENCE...")
@click.option("--file", default="adapterhub.lock", show_default=True, help="The lock file.")
@click.option("--registry", help="A registry's folder (none: the user's own).")
def command(references: tuple[str, ...], file: str, registry: str | None) -> None:
    """Pin what each REFERENCE means now in the project's lock file, by version and sha256."""
    from adapterhub.registry.lockfile import pin, read_lock, write_lock

    pins = read_lock(Path(file))
    for reference in references:
        name, pinned = pin(reference, registry)
        pins[name] = pinned
        click.echo(f"{name} = {pinned.reference}, sha256 {pinned.digest[:12]}")
    write_lock(Path(file), pins)

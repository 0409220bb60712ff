"""`adapterhub registry verify|reindex|gc`."""

from __future__ import annotations

import click

from adapterhub.errors import FileError

_registry = click.option("--registry", help="A registry's folder (none: the user's own).")


@click.group("registry")
def command() -> None:
    """Look after a local registry."""


@command.command()
@_registry
def verify(registry: str | None) -> None:
    """Read every version, and name those that are damaged."""
    from adapterhub.registry.local import LocalRegistry

    store = LocalRegistry(registry)
    if problems := store.verify():
        raise FileError(f"{store.root} has damaged versions", offenders=problems)
    click.echo(f"{store.root}: all versions are sound")


@command.command()
@_registry
def reindex(registry: str | None) -> None:
    """Make the index of searches anew from the folders."""
    from adapterhub.registry.local import LocalRegistry

    store = LocalRegistry(registry)
    click.echo(f"{store.root}: {store.reindex():,} names")


@command.command()
@_registry
def gc(registry: str | None) -> None:
    """Remove what interrupted writers left."""
    from adapterhub.registry.local import LocalRegistry

    store = LocalRegistry(registry)
    removed = store.gc()
    click.echo(f"{store.root}: {len(removed)} leftovers removed")

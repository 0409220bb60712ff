"""`adapterhub registry verify|reindex|gc`."""

from __future__ import annotations

import click

from adapterhub.cli._publishing import as_json_option, print_json
from adapterhub.errors import FileError

_registry = click.option("--registry", help="A registry's folder (none: the user's own).")


@click.group("registry")
def command() -> None:
    """Look after a local registry."""


@command.command()
@_registry
@as_json_option
def verify(registry: str | None, as_json: bool) -> None:
    """Read every version, and name those that are damaged."""
    from adapterhub.registry.local import LocalRegistry

    store = LocalRegistry(registry)
    problems = store.verify()
    if as_json:
        print_json({"registry": str(store.root), "problems": problems})
    if problems:
        raise FileError(f"{store.root} has damaged versions", offenders=problems)
    if not as_json:
        click.echo(f"{store.root}: all versions are sound")


@command.command()
@_registry
@as_json_option
def reindex(registry: str | None, as_json: bool) -> None:
    """Make the index of searches anew from the folders."""
    from adapterhub.registry.local import LocalRegistry

    store = LocalRegistry(registry)
    names = store.reindex()
    if as_json:
        print_json({"registry": str(store.root), "names": names})
    else:
        click.echo(f"{store.root}: {names:,} name{'s' * (names != 1)} in the index")


@command.command()
@_registry
@as_json_option
def gc(registry: str | None, as_json: bool) -> None:
    """Remove what interrupted writers left."""
    from adapterhub.registry.local import LocalRegistry

    store = LocalRegistry(registry)
    removed = store.gc()
    if as_json:
        print_json({"registry": str(store.root), "removed": [str(path) for path in removed]})
    else:
        click.echo(f"{store.root}: {len(removed)} leftovers removed")

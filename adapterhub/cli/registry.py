"""`adapterhub registry verify|reindex|gc`."""

from __future__ import annotations

import click

from adapterhub.cli._format import print_json, say
from adapterhub.cli._publishing import as_json_option, registry_option
from adapterhub.errors import FileError


@click.group("registry")
def command() -> None:
    """Verify, re-index or clean a local registry."""


@command.command("verify")
@registry_option
@as_json_option
def verify_registry(registry: str | None, as_json: bool) -> None:
    """Check all files, links and names, and list the problems."""
    from adapterhub.registry.local import LocalRegistry

    store = LocalRegistry(registry)
    problems = store.verify()
    if as_json:
        print_json({"registry": str(store.root), "problems": problems})
    if problems:
        raise FileError(f"problems in {store.root}", offenders=problems)
    if not as_json:
        say(f"{store.root}: all versions are intact")


@command.command()
@registry_option
@as_json_option
def reindex(registry: str | None, as_json: bool) -> None:
    """Rebuild the search index from the folders."""
    from adapterhub.registry.local import LocalRegistry

    store = LocalRegistry(registry)
    names = store.reindex()
    if as_json:
        print_json({"registry": str(store.root), "names": names})
    else:
        say(f"{store.root}: {names:,} name{'s' * (names != 1)} indexed")


@command.command()
@registry_option
@as_json_option
def gc(registry: str | None, as_json: bool) -> None:
    """Remove the files that interrupted writes left behind."""
    from adapterhub.registry.local import LocalRegistry

    store = LocalRegistry(registry)
    removed = store.gc()
    if as_json:
        print_json({"registry": str(store.root), "removed": [str(path) for path in removed]})
    else:
        say(f"{store.root}: {len(removed)} leftover{'s' * (len(removed) != 1)} removed")

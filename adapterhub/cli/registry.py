"""`adapterhub registry verify|index|gc`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from adapterhub.cli._format import print_json, print_result, say
from adapterhub.cli._options import as_json_option, registry_option
from adapterhub.errors import ConfigError, FileError

if TYPE_CHECKING:
    from adapterhub.registry.local import LocalRegistry


@click.group("registry")
def command() -> None:
    """Verify, index, copy or clean a registry."""


@command.command("verify")
@registry_option
@as_json_option
def verify_registry(registry: str | None, as_json: bool) -> None:
    """Check all files, links and names, and list the problems."""
    from adapterhub.registry.stores import registry_at

    store = registry_at(registry)
    problems = store.verify()
    if as_json:
        print_json({"registry": store.location, "problems": problems})
    if problems:
        raise FileError(f"problems in {store.location}", offenders=problems)
    if not as_json:
        say(f"{store.location}: all versions are intact")


@command.command()
@registry_option
@as_json_option
def index(registry: str | None, as_json: bool) -> None:
    """Write index.json anew, which searches read, from the folders."""
    from adapterhub.registry.stores import registry_at

    store = registry_at(registry)
    names = store.index()
    print_result(
        f"{store.location}: {names:,} name{'s' * (names != 1)} indexed",
        {"registry": store.location, "names": names},
        as_json=as_json,
    )


@command.command()
@registry_option
@as_json_option
def gc(registry: str | None, as_json: bool) -> None:
    """Remove the files that interrupted writes left behind."""
    store = _folder(registry)
    removed = store.gc()
    print_result(
        f"{store.root}: {len(removed)} leftover{'s' * (len(removed) != 1)} removed",
        {"registry": str(store.root), "removed": [str(path) for path in removed]},
        as_json=as_json,
    )


def _folder(location: str | None) -> LocalRegistry:
    """Open a registry that is a folder.

    Raises:
        ConfigError: it is elsewhere, where no files of interrupted writers are.
    """
    from adapterhub.registry.local import LocalRegistry
    from adapterhub.registry.stores import registry_at

    store = registry_at(location)
    if isinstance(store, LocalRegistry):
        return store
    raise ConfigError(
        f"{store.location} is no folder, and has no staging files",
        expected="a registry in a folder",
        hint="adapterhub registry verify checks a bucket; its lifecycle rules delete old uploads",
    )

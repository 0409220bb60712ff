"""`adapterhub registry verify|index|copy|gc|site`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from adapterhub.cli._format import print_copied, print_json, print_result, say
from adapterhub.cli._options import allow_option, as_json_option, registry_option
from adapterhub.errors import ConfigError, FileError

if TYPE_CHECKING:
    from adapterhub.registry.local import LocalRegistry


@click.group("registry")
def command() -> None:
    """Verify, index, copy or clean a registry, or write pages of it."""


@command.command("verify")
@registry_option
@as_json_option
def verify_registry(registry: str | None, as_json: bool) -> None:
    """Check all files, links and names, and list the problems."""
    from adapterhub.registry.local import registry_at

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
    """Rebuild index.json, which searches read, from the folders."""
    from adapterhub.registry.local import registry_at

    store = registry_at(registry)
    names = store.index()
    print_result(
        f"{store.location}: {names:,} name{'s' * (names != 1)} indexed",
        {"registry": store.location, "names": names},
        as_json=as_json,
    )


@command.command("copy")
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@allow_option
@as_json_option
def copy_versions(source: str, target: str, allow_findings: tuple[str, ...], as_json: bool) -> None:
    """Copy all versions FROM a registry TO another; what is there already stays as it is.

    Each is a folder, a bucket (s3://bucket/prefix), or an owner on a hub (hf:OWNER or
    https://HOST/OWNER); FROM may also be a registry on a web server. Numbers, tags, yanks and
    signatures are copied, too, and nothing is removed.
    """
    from adapterhub.registry.copying import copy_registry

    report = copy_registry(
        source, target, allow_findings=allow_findings, note=partial(say, err=True)
    )
    print_copied(report, source, target, as_json=as_json)


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


@command.command("site")
@registry_option
@click.option(
    "--study", "studies", multiple=True, metavar="FOLDER", help="Show a study's results, too."
)
@click.option("--title", default="Adapters", show_default=True, help="The name of the registry.")
@click.option(
    "--address", help="What readers type after --registry.  [default: the value given here]"
)
@click.option("--output", required=True, metavar="DIR", help="Folder for the pages.")
@as_json_option
def write_pages(
    registry: str | None,
    studies: tuple[str, ...],
    title: str,
    address: str | None,
    output: str,
    as_json: bool,
) -> None:
    """Write pages to look at a registry in a browser, for any web server or none."""
    from adapterhub.cli._site import command_of, study_boards
    from adapterhub.pages.site import SiteOptions, write_site
    from adapterhub.registry.local import registry_at

    boards = [board for folder in studies for board in study_boards(Path(folder))]
    options = SiteOptions(title, address or registry, boards, command_of)
    site = write_site(registry_at(registry), Path(output), options)
    problems = f"; {site.problems:,} versions cannot be read" if site.problems else ""
    print_result(
        f"{site.page}: {site.adapters:,} adapter{'s' * (site.adapters != 1)} for "
        f"{site.backbones:,} backbone{'s' * (site.backbones != 1)}, {site.pages:,} pages{problems}",
        {**vars(site), "page": str(site.page)},
        as_json=as_json,
    )


def _folder(location: str | None) -> LocalRegistry:
    """Open a registry in a folder.

    Raises:
        ConfigError: the registry is remote, where interrupted writers leave no files.
    """
    from adapterhub.registry.local import LocalRegistry, registry_at

    store = registry_at(location)
    if isinstance(store, LocalRegistry):
        return store
    raise ConfigError(
        f"{store.location} is not a folder and has no staging files",
        expected="a registry in a folder",
        hint="adapterhub registry verify checks a bucket; its lifecycle rules delete old uploads",
    )

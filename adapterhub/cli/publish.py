"""`adapterhub publish`."""

from __future__ import annotations

from typing import Any

import click

from adapterhub.cli._publishing import as_json_option, listing_of, listing_options, print_entry


@click.command("publish")
@click.argument("folder", metavar="DIR")
@click.option("--name", help="The name in the registry (none: the adapter's own).")
@click.option("--version", help="The version, v1 or later (none: the next).")
@click.option("--tag", "tags", multiple=True, help="A name for this version, such as best.")
@listing_options
@click.option("--registry", help="A registry's folder (none: the user's own).")
@as_json_option
def command(
    folder: str,
    name: str | None,
    version: str | None,
    tags: tuple[str, ...],
    registry: str | None,
    as_json: bool,
    **listing: Any,
) -> None:
    """Publish the adapter in DIR (a run's output, or an adapter's folder) to a local registry.

    A version never changes. The same bytes are the same version, however often they are published.
    A tag is a name for a version, and may move to another; description, licence, languages and
    topics belong to the version: another licence is another version.
    """
    from adapterhub.registry.publish import publish

    entry = publish(
        folder, name, version=version, tags=tags, registry=registry, listing=listing_of(listing)
    )
    print_entry(entry, as_json, "published")

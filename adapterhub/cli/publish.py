"""`adapterhub publish`."""

from __future__ import annotations

import click


@click.command("publish")
@click.argument("folder", metavar="DIR")
@click.option("--name", help="The name in the registry (none: the adapter's own).")
@click.option("--version", help="The version, v1 or later (none: the next).")
@click.option("--tag", "tags", multiple=True, help="A name for this version, such as best.")
@click.option("--registry", help="A registry's folder (none: the user's own).")
def command(
    folder: str, name: str | None, version: str | None, tags: tuple[str, ...], registry: str | None
) -> None:
    """Publish the adapter in DIR (a run's output, or an adapter's folder) to a local registry.

    A version never changes. The same bytes are the same version, however often they are published.
    """
    from adapterhub.registry.verbs import publish

    entry = publish(folder, name, version=version, tags=tags, registry=registry)
    click.echo(f"{entry.reference} for {entry.backbone}, sha256 {entry.digest[:12]}")

"""`adapterhub publish`."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from adapterhub.cli._format import print_next, print_published, say
from adapterhub.cli._options import (
    as_json_option,
    peft_options,
    private_key,
    publication_options,
    registry_option,
)


@click.command("publish")
@click.argument("folder", metavar="DIR")
@click.option("--name", help="Name in the registry (default: the adapter's or the run's).")
@click.option("--version", help="Version, v1 or later (default: the next).")
@click.option("--tag", "tags", multiple=True, help="A name for this version: best.")
@click.option(
    "--if",
    "only_if",
    metavar="CONDITION",
    help='Publish only if its score is so: "accuracy >= best", with the score of a tag.',
)
@publication_options
@peft_options
@registry_option
@as_json_option
def command(
    folder: str,
    name: str | None,
    version: str | None,
    tags: tuple[str, ...],
    only_if: str | None,
    registry: str | None,
    allow_findings: tuple[str, ...],
    as_json: bool,
    peft: bool | None,
    backbone: str | None,
    key: str | None,
    **description: Any,
) -> None:
    """Publish an adapter to a registry: a folder, or a bucket.

    DIR is a run folder or an adapter folder. A version is immutable: publishing the same bytes
    again returns the same version. A tag can move to another version. Description, licence,
    languages and topics are part of the version: changing the licence makes a new one.
    """
    from adapterhub.registry.publish import PublicationInfo, publish

    entry = publish(
        folder,
        name,
        version=version,
        tags=tags,
        registry=registry,
        listing=PublicationInfo(**description),
        sign=private_key(key),
        allow_findings=allow_findings,
        peft=peft,
        backbone=backbone,
        only_if=only_if,
        note=partial(say, err=True),
    )
    print_published(entry, "published", as_json=as_json)
    if not as_json:
        print_next(entry, registry)

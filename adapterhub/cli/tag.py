"""`adapterhub tag`."""

from __future__ import annotations

import click

from adapterhub.cli._format import print_json, say
from adapterhub.cli._options import as_json_option, backbone_option, registry_option


@click.command("tag")
@click.argument("reference", metavar="NAME[@VERSION]")
@click.argument("tag", required=False)
@click.option("--remove", is_flag=True, help="Remove TAG.")
@backbone_option
@registry_option
@as_json_option
def command(
    reference: str,
    tag: str | None,
    remove: bool,
    backbone: str | None,
    registry: str | None,
    as_json: bool,
) -> None:
    """Name a version in a registry or on a hub, move such a name, or list them.

    NAME@TAG is then that version. Without a version, the newest one is tagged; without TAG, the
    tags are listed.
    """
    from adapterhub.registry.tag_yank_delete import tag as change

    if remove and tag is None:
        raise click.UsageError("--remove takes a TAG")
    before = change(reference, registry=registry, backbone=backbone) if tag else {}
    tags = change(reference, tag, remove=remove, registry=registry, backbone=backbone)
    name = reference.rpartition("@")[0] or reference
    if as_json:
        print_json({"name": name, "tags": tags})
    elif tag is None:
        for known, version in tags.items() or [("no tag", "")]:
            say(f"{known:20} {version}".rstrip())
    elif remove:
        say(f"removed the tag {tag}, which was {before[tag]}")
    else:
        moved = f", before {before[tag]}" if before.get(tag) not in (None, tags[tag]) else ""
        say(f"{name}@{tag} is {tags[tag]}{moved}")

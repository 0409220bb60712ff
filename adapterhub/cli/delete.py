"""`adapterhub delete`."""

from __future__ import annotations

import sys

import click

from adapterhub.cli._format import examples, print_json, say
from adapterhub.cli._publishing import as_json_option, backbone_option, registry_option
from adapterhub.errors import ConfigError


@click.command(
    "delete",
    epilog=examples(
        "adapterhub delete sst2@v1",
        "adapterhub yank sst2@v1 --reason WHY     # withdraws it, keeps its files",
    ),
)
@click.argument("reference", metavar="NAME@VERSION")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Delete it although adapterhub.lock here pins it.")
@backbone_option
@registry_option
@as_json_option
def command(
    reference: str,
    yes: bool,
    force: bool,
    backbone: str | None,
    registry: str | None,
    as_json: bool,
) -> None:
    """Delete a version from a local registry, for good.

    Its number is not used again. Who has pinned or copied it keeps only their own copy. On a hub,
    use its web page.
    """
    from adapterhub.registry.changes import deletable, delete
    from adapterhub.registry.stores import registry_at

    deletable(reference)
    if not yes:
        _ask(f"Delete {reference} from {registry_at(registry).location} for good?")
    deleted = delete(reference, registry=registry, backbone=backbone, force=force)
    if as_json:
        print_json({"deleted": deleted})
    else:
        say(f"deleted {deleted}")


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise ConfigError("nobody to ask: standard input is no terminal", hint="--yes")
    click.confirm(question, abort=True, err=True)

"""`adapterhub delete`."""

from __future__ import annotations

import sys

import click

from adapterhub.cli._format import print_result
from adapterhub.cli._options import as_json_option, backbone_option, registry_option
from adapterhub.errors import ConfigError


@click.command("delete")
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
    """Delete a version from a registry, or from a hub of adapterhub, for good.

    Its number is not used again. Who has pinned or copied it keeps only their own copy. On the
    Hugging Face Hub, use its web page.
    """
    from adapterhub.registry.local import registry_at
    from adapterhub.registry.tag_yank_delete import deletable, delete

    parsed = deletable(reference)
    if not yes:
        place = f" from {registry_at(registry).location}" if parsed.kind == "local" else ""
        _ask(f"Delete {reference}{place} for good?")
    deleted = delete(reference, registry=registry, backbone=backbone, force=force)
    print_result(f"deleted {deleted}", {"deleted": deleted}, as_json=as_json)


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise ConfigError("cannot ask for confirmation: not running in a terminal", hint="--yes")
    click.confirm(question, abort=True, err=True)

"""Options and output shared by the registry commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import click

from adapterhub.cli._format import print_json, say

if TYPE_CHECKING:
    from adapterhub.registry.publication import PublicationInfo
    from adapterhub.registry.store import Entry

Function = TypeVar("Function", bound=Callable[..., Any])

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
registry_option = click.option("--registry", help="Registry folder (default: your own registry).")
allow_finding_option = click.option(
    "--allow-finding",
    "allow_findings",
    multiple=True,
    metavar="CODE",
    help="Publish a text that looks private and is not.",
)
backbone_option = click.option("--backbone", help="Only for this backbone: its id or fingerprint.")


def publication_options(function: Function) -> Function:
    """Add the options that describe an adapter to publish."""
    for option in (
        click.option("--topic", "topics", multiple=True, help="A subject: german, medical."),
        click.option("--language", multiple=True, help="A language of the data: en, de."),
        click.option("--license", help="Licence of the adapter: apache-2.0, cc-by-4.0."),
        click.option("--description", help="One sentence for the card and the listing."),
    ):
        function = option(function)
    return function


def publication_info(options: dict[str, Any]) -> PublicationInfo:
    """Build the description of a publication from the values of `publication_options`."""
    from adapterhub.registry.publication import PublicationInfo

    return PublicationInfo(**options)


def print_entry(entry: Entry, as_json: bool, done: str) -> None:
    """Print a published version, as one line or as JSON.

    Args:
        entry: the version.
        as_json: print its fields as one JSON object.
        done: what was done with it, in the past tense: "published".
    """
    if as_json:
        print_json(asdict(entry))
    else:
        say(f"{done} {entry.reference} for {entry.backbone}, sha256 {entry.digest[:12]}")

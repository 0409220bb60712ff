"""What the commands of the registry share: what a publisher says, and how an entry is printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from adapterhub.registry.publication import PublicationInfo
    from adapterhub.registry.store import Entry

Function = TypeVar("Function", bound=Callable[..., Any])

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def listing_options(function: Function) -> Function:
    """The options by which a publisher says what an adapter is."""
    for option in (
        click.option("--topic", "topics", multiple=True, help="What it is about: german, medical."),
        click.option("--language", multiple=True, help="A language of its data: en, de."),
        click.option("--license", help="The licence of the adapter: apache-2.0, cc-by-4.0."),
        click.option("--description", help="One sentence for the card and the listing."),
    ):
        function = option(function)
    return function


def listing_of(options: dict[str, Any]) -> PublicationInfo:
    """What the options of `listing_options` say."""
    from adapterhub.registry.publication import PublicationInfo

    return PublicationInfo(**options)


def print_entry(entry: Entry, as_json: bool, done: str) -> None:
    """What was done with a version, for a person or a program."""
    if as_json:
        print_json(asdict(entry))
    else:
        click.echo(f"{done} {entry.reference} for {entry.backbone}, sha256 {entry.digest[:12]}")


def print_json(value: object) -> None:
    """One JSON document in one line."""
    click.echo(json.dumps(value, sort_keys=True))

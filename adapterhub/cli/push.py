"""`adapterhub push`."""

from __future__ import annotations

from typing import Any

import click

from adapterhub.cli._publishing import as_json_option, listing_of, listing_options, print_entry


@click.command("push")
@click.argument("folder", metavar="DIR")
@click.argument("reference")
@click.option("--private", is_flag=True, help="Make a new repository private.")
@click.option("--tag", "tags", multiple=True, help="A git tag for this version.")
@listing_options
@click.option("--no-peft", is_flag=True, help="Do not write peft's two files beside ours.")
@click.option("--backbone", help="A folder with the backbone, if the Hub has it not.")
@as_json_option
def command(
    folder: str,
    reference: str,
    private: bool,
    tags: tuple[str, ...],
    no_peft: bool,
    backbone: str | None,
    as_json: bool,
    **listing: Any,
) -> None:
    """Push the adapter in DIR to the Hub (hf:owner/name), or a hub of your own
    (https://host/owner/name), with a card.

    Where peft can express the adapter, its two files are written beside ours, so that plain peft
    loads the repository; else the card says why not.

    The token is the one that huggingface_hub finds: HF_TOKEN, or `hf auth login`.
    """
    from adapterhub.registry.push import push

    entry = push(
        folder,
        reference,
        visibility="private" if private else "public",
        tags=tags,
        listing=listing_of(listing),
        peft=not no_peft,
        backbone=backbone,
        note=lambda text: click.echo(text, err=True),
    )
    print_entry(entry, as_json, "pushed")

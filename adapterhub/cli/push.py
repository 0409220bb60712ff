"""`adapterhub push`."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from adapterhub.cli._format import print_next, print_published, say
from adapterhub.cli._options import as_json_option, peft_options, private_key, publication_options


@click.command("push")
@click.argument("folder", metavar="DIR")
@click.argument("reference")
@click.option("--private", is_flag=True, help="Make a new repository private.")
@click.option("--tag", "tags", multiple=True, help="A git tag for this version.")
@publication_options
@peft_options
@as_json_option
def command(
    folder: str,
    reference: str,
    private: bool,
    tags: tuple[str, ...],
    peft: bool | None,
    backbone: str | None,
    allow_findings: tuple[str, ...],
    as_json: bool,
    key: str | None,
    **description: Any,
) -> None:
    """Push an adapter and its card to the Hugging Face Hub or your own hub.

    REFERENCE is hf:OWNER/NAME or https://HOST/OWNER/NAME. The files of DIR are pushed. --peft makes
    the two files that plain peft loads, too; if peft does not support the adapter, the card says
    why.

    The access token comes from HF_TOKEN or `hf auth login`.
    """
    from adapterhub.registry.publish import PublicationInfo, push

    entry = push(
        folder,
        reference,
        visibility="private" if private else "public",
        tags=tags,
        listing=PublicationInfo(**description),
        sign=private_key(key),
        allow_findings=allow_findings,
        peft=peft,
        backbone=backbone,
        note=partial(say, err=True),
    )
    print_published(entry, "pushed", as_json=as_json)
    if not as_json:
        print_next(entry)

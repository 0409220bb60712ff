"""`adapterhub push`."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from adapterhub.cli._format import print_next, print_published, say
from adapterhub.cli._options import as_json_option, private_key, publication_options


@click.command("push")
@click.argument("folder", metavar="DIR")
@click.argument("reference")
@click.option("--private", is_flag=True, help="Make a new repository private.")
@click.option("--tag", "tags", multiple=True, help="A git tag for this version.")
@publication_options
@click.option("--no-peft", is_flag=True, help="Do not add the files of the peft format.")
@click.option("--backbone", help="Folder of the backbone, if it is not on the Hub.")
@as_json_option
def command(
    folder: str,
    reference: str,
    private: bool,
    tags: tuple[str, ...],
    no_peft: bool,
    backbone: str | None,
    allow_findings: tuple[str, ...],
    as_json: bool,
    key: str | None,
    **description: Any,
) -> None:
    """Push an adapter and its card to the Hugging Face Hub or your own hub.

    REFERENCE is hf:OWNER/NAME or https://HOST/OWNER/NAME. If peft supports the adapter, the
    repository also gets the two files that plain peft loads; if not, the card says why.

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
        peft=not no_peft,
        backbone=backbone,
        note=partial(say, err=True),
    )
    print_published(entry, "pushed", as_json=as_json)
    if not as_json:
        print_next(entry)

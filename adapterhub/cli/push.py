"""`adapterhub push`."""

from __future__ import annotations

import click


@click.command("push")
@click.argument("folder", metavar="DIR")
@click.argument("reference")
@click.option("--private", is_flag=True, help="Make a new repository private.")
@click.option("--tag", "tags", multiple=True, help="A git tag for this version.")
def command(folder: str, reference: str, private: bool, tags: tuple[str, ...]) -> None:
    """Push the adapter in DIR to the Hub (hf:owner/name), or a hub of your own
    (https://host/owner/name).

    The token is the one that huggingface_hub finds: HF_TOKEN, or `hf auth login`.
    """
    from adapterhub.registry.verbs import push

    visibility = "private" if private else "public"
    entry = push(folder, reference, visibility=visibility, tags=tags)  # type: ignore[arg-type]
    click.echo(f"{entry.reference} for {entry.backbone}, sha256 {entry.digest[:12]}")

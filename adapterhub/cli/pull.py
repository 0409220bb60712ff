"""`adapterhub pull`."""

from __future__ import annotations

import click

from adapterhub.cli._format import print_result
from adapterhub.cli._options import (
    as_json_option,
    backbone_option,
    registry_option,
    require_signature_option,
)
from adapterhub.config.user_folders import expanded


@click.command("pull")
@click.argument("reference")
@click.option("--to", "folder", help="New folder for the files (default: the store's copy).")
@backbone_option
@registry_option
@click.option("--allow-pickle", is_flag=True, help="Accept pickled tensors; no code is run.")
@require_signature_option
@as_json_option
def command(
    reference: str,
    folder: str | None,
    backbone: str | None,
    registry: str | None,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Fetch the files of a published adapter, verify them and print their folder.

    REFERENCE is NAME[@VERSION], hf:OWNER/NAME[@REVISION] or https://HOST/OWNER/NAME.
    """
    from adapterhub.registry.pull import pull_verified

    pulled = pull_verified(
        reference,
        None if folder is None else expanded(folder),
        backbone=backbone,
        registry=registry,
        allow_pickle=allow_pickle,
    )
    record = {
        "folder": str(pulled.folder),
        "reference": str(pulled.reference or reference),  # with the delivered version
        "digest": pulled.digest,
    }
    print_result(str(pulled.folder), record, as_json=as_json)

"""`adapterhub sign`."""

from __future__ import annotations

import click

from adapterhub.cli._format import print_result
from adapterhub.cli._options import as_json_option, backbone_option, private_key, registry_option


@click.command("sign")
@click.argument("reference", metavar="ADAPTER")
@click.option("--key", required=True, help="File of the private key.")
@click.option("--name", help="Of a folder: the name that you publish it by, if not its own.")
@click.option("--version", help="Of a folder: the version that you publish it as.")
@backbone_option
@registry_option
@as_json_option
def command(
    reference: str,
    key: str,
    name: str | None,
    version: str | None,
    backbone: str | None,
    registry: str | None,
    as_json: bool,
) -> None:
    """Sign an adapter in a folder or a local registry.

    The signature is written to adapter.sig next to the manifest. It binds the name and version to
    exactly this manifest and these tensors; it does not cover the card. On a hub, sign when
    you push.
    """
    from adapterhub.registry.publish import sign

    signer = private_key(key)
    assert signer is not None
    signature = sign(
        reference, signer, name=name, version=version, backbone=backbone, registry=registry
    )
    statement = signature.statement
    named = {"name": statement.name, "version": statement.version}
    subject = " ".join(filter(None, named.values()))
    print_result(
        f"signed {subject}, sha256 {statement.digest[:12]}, by key {signature.signer.id}",
        {"key": signature.key, "digest": statement.digest, **named},
        as_json=as_json,
    )

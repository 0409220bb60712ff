"""`adapterhub verify`."""

from __future__ import annotations

import sys

import click

from adapterhub.cli._format import print_json, say
from adapterhub.cli._options import as_json_option, backbone_option, registry_option
from adapterhub.errors import printable


@click.command("verify")
@click.argument("reference", metavar="ADAPTER")
@backbone_option
@registry_option
@as_json_option
def command(reference: str, backbone: str | None, registry: str | None, as_json: bool) -> None:
    """Verify the files of an adapter, and show who signed it.

    ADAPTER is a folder or a published name. The exit code is 0 if a key that you trust for it has
    signed it, otherwise 1; if the files are damaged, 2.
    """
    from adapterhub.registry.pull import verify

    verified = verify(reference, backbone=backbone, registry=registry)
    if as_json:
        signatures = [
            {
                **vars(checked.signature.statement),
                "key": checked.signature.key,
                "valid": checked.is_valid,
                "trusted": checked.is_valid and checked.is_trusted,
                "problem": checked.problem,
            }
            for checked in verified.signatures
        ]
        facts = {"reference": verified.reference, "digest": verified.digest}
        print_json({**facts, "trusted": verified.is_trusted, "signatures": signatures})
    else:
        say(printable(f"{verified.reference}: files intact, sha256 {verified.digest[:12]}"))
        for line in map(str, verified.signatures):
            say(printable(line))
        if not verified.signatures:
            say("no signature")
    sys.exit(0 if verified.is_trusted else 1)

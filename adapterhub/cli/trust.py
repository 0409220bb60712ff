"""`adapterhub trust`."""

from __future__ import annotations

import re

import click

from adapterhub.cli._format import print_json, say
from adapterhub.cli._options import as_json_option
from adapterhub.errors import ConfigError


@click.command("trust")
@click.argument("key", required=False)
@click.option("--remove", is_flag=True, help="Remove KEY, which may also be its id.")
@click.option(
    "--require-signatures/--no-require-signatures",
    "required",
    default=None,
    help="Require that all adapters, also in folders, are signed by a trusted key.",
)
@as_json_option
def command(key: str | None, remove: bool, required: bool | None, as_json: bool) -> None:
    """List, add or remove the keys that you trust.

    KEY is a public key or its file. `adapterhub verify` shows whether a trusted key signed an
    adapter; with --require-signatures, no other adapter is used.
    """
    from adapterhub.registry.trust import require_signatures

    if key is not None:
        _change(key, remove)
    elif remove:
        raise ConfigError("nothing to remove", expected="adapterhub trust --remove KEY")
    if required is not None:
        require_signatures(required)
    if key is None or required is not None:
        _list(as_json)


def _change(key: str, remove: bool) -> None:
    from adapterhub.files.signature import read_public_key
    from adapterhub.registry.trust import distrust_key, trust_key

    if remove and re.fullmatch("[0-9a-f]{16}", key):  # an id
        distrust_key(key)
        say(f"no longer trusted: key {key}")
        return
    public = read_public_key(key)
    if remove:
        distrust_key(public.text)
        say(f"no longer trusted: key {public.id}")
    else:
        trust_key(public)
        say(f"trusted: key {public.id}")


def _list(as_json: bool) -> None:
    from adapterhub.files.signature import PublicKey
    from adapterhub.registry.trust import read_trust, trust_path

    trust = read_trust()
    if as_json:
        facts = {"file": str(trust_path()), "require": trust.required}
        print_json({**facts, "trusted": list(trust.keys)})
        return
    for key in trust.keys:
        say(f"{key} {PublicKey(key).id}")
    state = "must be signed by one of them" if trust.required else "need no signature"
    say(f"adapters {state} ({trust_path()})", err=True)

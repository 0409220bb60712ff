"""`adapterhub trust`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from adapterhub.cli._format import examples, print_json, say
from adapterhub.cli._publishing import as_json_option
from adapterhub.errors import ConfigError

if TYPE_CHECKING:
    from adapterhub.registry.namespaces import Namespace


@click.command(
    "trust",
    epilog=examples(
        "adapterhub trust 'hf:acme/*' acme.pub",
        "adapterhub trust 'hf:acme/*' ed25519:...",
        "adapterhub trust --remove 'hf:acme/*'",
        "adapterhub trust --require-signatures",
    ),
)
@click.argument("namespace", required=False)
@click.argument("key", required=False)
@click.option("--remove", is_flag=True, help="Remove KEY, or all keys of NAMESPACE.")
@click.option(
    "--require-signatures/--no-require-signatures",
    "required",
    default=None,
    help="Whether adapters of all other places, and folders, must be signed too.",
)
@as_json_option
def command(
    namespace: str | None, key: str | None, remove: bool, required: bool | None, as_json: bool
) -> None:
    """List, add or remove the keys that you trust.

    NAMESPACE is hf:OWNER/*, hf:OWNER/NAME, https://HOST/OWNER/*, or NAME or * for local
    registries. KEY is a public key or its file. Adapters in a namespace with trusted keys must be
    signed by one of them wherever they are used; of several namespaces, the most specific decides.
    """
    from adapterhub.registry.namespaces import parse_namespace
    from adapterhub.registry.trust import require_signatures

    if namespace is not None:
        _change(parse_namespace(namespace), key, remove)
    elif remove:
        raise ConfigError("nothing to remove", expected="adapterhub trust --remove NAMESPACE [KEY]")
    if required is not None:
        require_signatures(required)
    if namespace is None or required is not None:
        _list(as_json)


def _change(namespace: Namespace, key: str | None, remove: bool) -> None:
    from adapterhub.files.keys import read_public_key
    from adapterhub.registry.trust import distrust_key, trust_key

    if not remove:
        if key is None:
            raise ConfigError(
                f"no key for {namespace}", expected=f"adapterhub trust '{namespace}' KEY"
            )
        public = read_public_key(key)
        trust_key(namespace, public)
        say(f"trusted for {namespace}: key {public.id}; its adapters must be signed now")
        return
    if key is not None and not re.fullmatch("[0-9a-f]{16}", key):  # not an id
        key = read_public_key(key).text
    kept = distrust_key(namespace, key)
    if kept:
        say(f"{namespace}: keys that remain: {len(kept)}")
    else:
        say(f"{namespace}: no key is trusted; its adapters need no signature now")


def _list(as_json: bool) -> None:
    from adapterhub.files.keys import PublicKey
    from adapterhub.registry.trust import read_trust, trust_path

    trust = read_trust()
    if as_json:
        trusted = {str(name): list(keys) for name, keys in sorted(trust.trusted.items())}
        required = trust.require_signatures
        print_json({"file": str(trust_path()), "require": required, "trusted": trusted})
        return
    for name, keys in sorted(trust.trusted.items()):
        for key in keys:
            say(f"{name} {key} {PublicKey(key).id}")
    others = "must be signed" if trust.require_signatures else "need no signature"
    say(f"other adapters {others} ({trust_path()})", err=True)

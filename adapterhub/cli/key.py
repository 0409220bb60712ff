"""`adapterhub key new|show`."""

from __future__ import annotations

import click

from adapterhub.cli._format import print_json, print_result, say
from adapterhub.cli._options import as_json_option, private_key


@click.group("key")
def command() -> None:
    """Create a key pair for signatures, or show its public key."""


@command.command("new")
@click.argument("file")
@click.option(
    "--passphrase",
    is_flag=True,
    help="Encrypt the private key with a passphrase, which is prompted for.",
)
@as_json_option
def new_key(file: str, passphrase: bool, as_json: bool) -> None:
    """Create an Ed25519 key pair: the private key in FILE, the public one next to it.

    Keep FILE secret: anyone who has it can sign in your name. Publish the public key where people
    look for it, such as your home page.
    """
    from adapterhub.files.signature import write_key_pair

    secret = None
    if passphrase:
        secret = click.prompt("Passphrase", hide_input=True, confirmation_prompt=True, err=True)
    public_path, key = write_key_pair(file, secret)
    if as_json:
        print_json({"private": file, "public": str(public_path), "key": key.text, "id": key.id})
        return
    say(f"{file}: the private key, for adapterhub sign --key {file}")
    say(f"{public_path}: {key.text}, id {key.id}")


@command.command("show")
@click.argument("file")
@as_json_option
def show_key(file: str, as_json: bool) -> None:
    """Print the public key of a private or public key file, and its id."""
    from adapterhub.errors import ConfigError
    from adapterhub.files.signature import read_public_key

    try:
        key = read_public_key(file)
    except ConfigError:
        private = private_key(file)
        assert private is not None
        key = private.public
    print_result(f"{key.text} {key.id}", {"key": key.text, "id": key.id}, as_json=as_json)

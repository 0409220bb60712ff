"""Access tokens of hubs. A token belongs to one origin and is sent to no other.

The token of huggingface_hub (`$HF_TOKEN`, `hf auth login`) belongs to its endpoint: the Hub, or
`$HF_ENDPOINT`. Tokens for other hubs come from `adapterhub login https://host`, which writes
`tokens.json` in the user's configuration folder with mode 0600, or from the environment:

    ADAPTERHUB_TOKENS="https://hub.example.org=TOKEN https://other.example.org=TOKEN"

Tokens are sent only over https or within this machine.
"""

from __future__ import annotations

import base64
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from adapterhub.backbones.hub_network import ForbiddenAddressError, Reach, reach_of, url_origin
from adapterhub.config.options import to_dict
from adapterhub.config.user_folders import user_folder
from adapterhub.errors import ConfigError, FileError, NotPublishedError
from adapterhub.files import schema
from adapterhub.files.atomic import UnreadableError, explained, read_file, replace_file

VARIABLE = "ADAPTERHUB_TOKENS"
_TOKEN = re.compile(r"[\x21-\x7e]{8,4096}")
_MAX_BYTES = 4 << 20
_RUN = 8  # a text with this many consecutive characters of a token is not shown
_Origin = Annotated[str, schema.text(r"https?://[a-z0-9_.:\[\]-]{1,262}", "an origin")]
_Token = Annotated[str, schema.text(_TOKEN.pattern, "a token")]


@dataclass(frozen=True)
class _TokenFile:
    """The contents of the file."""

    tokens: dict[_Origin, _Token]
    version: Annotated[int, schema.integer(1, 1)] = 1


def token_for(url: str) -> str | None:
    """Return the token for the hub at a URL, or None.

    Raises:
        ConfigError: `$ADAPTERHUB_TOKENS` is malformed.
        FileError: the file of tokens is malformed.
    """
    from huggingface_hub import constants, get_token  # slow to import

    origin = _origin(url)
    if not _is_encrypted(origin):
        return None
    if stored := (_environment().get(origin) or _stored().get(origin)):
        return stored
    if origin != _origin(constants.ENDPOINT) or constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return None
    token = get_token()
    return token if token and _TOKEN.fullmatch(token) else None


def check_token(url: str, token: str) -> None:
    """Check with the hub at a URL that a token is valid.

    Raises:
        ConfigError: the token is invalid, or tokens may not be sent to the URL.
        UnreachableError: the hub cannot be reached.
    """
    from adapterhub.registry.hub_client import HubClient  # slow to import

    origin = _checked_origin(url, token)
    try:
        HubClient(url.rstrip("/"), token=token).read("/api/whoami-v2", 1 << 20, origin)
    except NotPublishedError:
        raise ConfigError(
            f"{origin} does not accept this token: nothing was stored",
            expected="a token of this hub that has not expired",
            hint="--unchecked stores it all the same",
        ) from None


def login(url: str, token: str) -> str:
    """Store the token for the hub at a URL; return the origin that it will be sent to.

    Raises:
        ConfigError: tokens may not be sent to the URL, or the token is malformed.
        OutputError: the configuration folder cannot be written.
    """
    origin = _checked_origin(url, token)
    _store({**_stored(), origin: token})
    return origin


def _checked_origin(url: str, token: str) -> str:
    """Return the origin that a token is sent to.

    Raises:
        ConfigError: tokens may not be sent there, or the URL has no origin.
    """
    origin = _origin(url)
    if not _is_encrypted(origin):
        raise ConfigError(f"a token is not sent to {origin}", expected="an https URL")
    if not _TOKEN.fullmatch(token):
        raise ConfigError("this is not a token", expected="8 to 4,096 printable ASCII characters")
    return origin


def logout(url: str) -> str:
    """Delete the stored token for the hub at a URL; return its origin.

    Raises:
        ConfigError: no token is stored for it.
        OutputError: the configuration folder cannot be written.
    """
    tokens, origin = _stored(), _origin(url)
    if origin not in tokens:
        raise ConfigError(
            f"no token is stored for {origin}", expected=", ".join(sorted(tokens)) or "none is"
        )
    _store({name: token for name, token in tokens.items() if name != origin})
    return origin


def echoes(text: str, token: str | None) -> bool:
    """Return whether a text contains part of a token: plain, reversed, in base64 or in hex."""
    if not token:
        return False
    data = token.encode()
    shifted = (base64.b64encode(b" " * n + data).decode()[4:-4] for n in range(3))
    plain = _letters(text)
    for form in map(_letters, (token, token[::-1], data.hex(), *shifted)):
        if any(form[i : i + _RUN] in plain for i in range(max(len(form) - _RUN, 0) + 1) if form):
            return True
    return False


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _is_encrypted(origin: str) -> bool:
    host = urlsplit(origin).hostname or ""
    return origin.startswith("https:") or reach_of(host) == Reach.LOOPBACK


def _origin(url: str) -> str:
    try:
        return url_origin(url)
    except ForbiddenAddressError as error:
        raise ConfigError(f"{url[:80]!r} is {error}", expected="https://host") from None


def _environment() -> dict[str, str]:
    tokens = {}
    for item in os.environ.get(VARIABLE, "").split():
        url, equals, token = item.partition("=")
        if not equals or not _TOKEN.fullmatch(token):
            raise ConfigError(f"${VARIABLE} is malformed", expected="https://host=TOKEN ...")
        tokens[_origin(url)] = token
    return tokens


def _file() -> Path:
    return user_folder("config") / "tokens.json"


def _stored() -> dict[str, str]:
    path = _file()
    if not path.exists():
        return {}
    file = None
    with suppress(UnreadableError):
        data = read_file(path, 0, _MAX_BYTES, None)
        file, _ = schema.parse_record(_TokenFile, data, _MAX_BYTES)  # problems may quote a token
    if file is None:
        raise FileError(f"{path} is not a file of tokens", hint="delete it, and log in again")
    return file.tokens


def _store(tokens: dict[str, str]) -> None:
    path = _file()
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, schema.canonical_json(to_dict(_TokenFile(tokens))), private=True)

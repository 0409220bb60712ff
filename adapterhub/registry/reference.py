"""References: the one way to say which adapter is meant, for every command and function.

    ./folder    ../x   /abs   ~/x        a folder on this machine
    name[@version]                       the local registry
    hf:owner/name[@revision]             the Hugging Face Hub
    https://host/owner/name[@revision]   a hub of one's own; http only on this machine

A version of the local registry is a number (`3` or `v3`) or a tag; a revision is a commit, branch
or tag.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from adapterhub.errors import ConfigError

Place = Literal["folder", "local", "hub", "server"]

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
_VERSION = r"[A-Za-z0-9][A-Za-z0-9_./-]{0,199}"
_LOOKS_LIKE_FOLDER = re.compile(r"\.{1,2}([/\\]|$)|[/~\\]|[A-Za-z]:[/\\]")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
FORMS = "./folder, name[@version], hf:owner/name[@revision], https://host/owner/name[@revision]"


@dataclass(frozen=True)
class Reference:
    """Where an adapter is: `parse_reference(str(reference)) == reference`.

    `name` is a path for a folder, `owner/name` on a hub; `host` is a server's scheme and host.
    """

    place: Place
    name: str
    version: str | None = None
    host: str | None = None

    def __str__(self) -> str:
        start = {"hub": "hf:", "server": f"{self.host}/"}.get(self.place, "")
        return f"{start}{self.name}" + (f"@{self.version}" if self.version else "")


def parse_reference(text: str) -> Reference:
    """The reference that a text is.

    Raises:
        ConfigError: it is of none of the four forms, or might be of two.
    """
    if not text or not text.isprintable() or text != text.strip():
        raise _refused(text, "is not a reference")
    if _LOOKS_LIKE_FOLDER.match(text):
        return Reference("folder", text)
    if text.startswith("hf:"):
        return _on_hub(text)
    if "://" in text:
        return _on_server(text)
    return _local(text)


def is_name(text: str) -> bool:
    """Whether a text can be the name of an adapter in a local registry."""
    return ".." not in text and re.fullmatch(_NAME, text) is not None


def _on_hub(text: str) -> Reference:
    name, version = _split(text, text.removeprefix("hf:"))
    if not _is_repository(name):
        raise _refused(text, "does not name a repository of the Hub", "hf:owner/name[@revision]")
    return Reference("hub", name, version)


def _on_server(text: str) -> Reference:
    try:
        parts = urlsplit(text)
        host, plain = parts.hostname, f"{parts.scheme}://{parts.netloc}"
        _ = parts.port  # raises if it is no number
    except ValueError as error:
        raise _refused(text, f"is not an address: {error}") from None
    secure = parts.scheme == "https" or (parts.scheme == "http" and host in _LOOPBACK)
    if not host or not secure:
        raise _refused(text, "is not an https address", "https://host/owner/name[@revision]")
    if parts.username is not None or parts.query or parts.fragment:
        # What stands before @ may be a password: do not show it.
        shown = text.replace(f"{parts.netloc.rpartition('@')[0]}@", "")
        raise _refused(shown, "has more than a host and a name", "https://host/owner/name")
    name, version = _split(text, parts.path.removeprefix("/"))
    if not _is_repository(name):
        raise _refused(text, "does not name an adapter", "https://host/owner/name[@revision]")
    return Reference("server", name, version, plain)


def _local(text: str) -> Reference:
    name, version = _split(text, text)
    if "/" in name or "\\" in name:
        hint = f"./{text} for a folder" + (
            f", hf:{text} for the Hub" if _is_repository(name) else ""
        )
        raise _refused(text, "could be a folder or a repository of the Hub", hint=hint)
    if not is_name(name):
        raise _refused(text, "is not a name in the registry", "letters, digits and . _ - inside")
    return Reference("local", name, version)


def _split(text: str, rest: str) -> tuple[str, str | None]:
    name, at, version = rest.partition("@")
    if at and (not re.fullmatch(_VERSION, version) or ".." in version):
        raise _refused(text, f"has no readable version after @: {version!r}")
    return name, version or None


def _is_repository(name: str) -> bool:
    return ".." not in name and re.fullmatch(rf"{_NAME}/{_NAME}", name) is not None


def _refused(text: str, problem: str, expected: str = FORMS, hint: str = "") -> ConfigError:
    return ConfigError(f"{text!r} {problem}", expected=expected, hint=hint)

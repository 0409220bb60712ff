"""Namespaces: the part of a place that keys are trusted for.

    hf:acme/polite   hf:acme/*   hf:*                     the Hugging Face Hub
    https://host/acme/polite   https://host/acme/*   https://host/*
    polite   *                                            local registries

A place may have several addresses: `hf:acme/x` and `https://huggingface.co/acme/x` are one
repository, and `hf:` stands for `$HF_ENDPOINT`. Names are compared without regard to case, as on
the Hub.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from adapterhub.errors import ConfigError
from adapterhub.registry.reference import Reference, parse_reference

HUB, LOCAL = "hf:", "local"
DEFAULT_HUB = "https://huggingface.co"
_OFFICIAL = {DEFAULT_HUB, "https://www.huggingface.co", "https://hf.co"}
_FORMS = "hf:OWNER/*, hf:OWNER/NAME, hf:*, https://HOST/OWNER/*, NAME, or * for local registries"


@dataclass(frozen=True, order=True)
class Namespace:
    """All adapters at a place, or those of an owner, or one of them; a `*` is the empty text."""

    place: str
    owner: str = ""
    name: str = ""

    def __str__(self) -> str:
        start = {HUB: HUB, LOCAL: ""}.get(self.place, f"{self.place}/")
        return start + "/".join(filter(None, (self.owner, self.name or "*")))

    @property
    def depth(self) -> int:
        """How specific it is: 0 for a whole place, 2 for one adapter."""
        return 2 if self.name else 1 if self.owner else 0

    def covers(self, place: str, owner: str, name: str) -> bool:
        """Return whether an adapter is in this namespace.

        Args:
            place: where the adapter is, as `canonical_place` writes it.
            owner: its owner in lower case, or the empty text.
            name: its name in lower case.
        """
        return self.place == place and self.owner in ("", owner) and self.name in ("", name)


def parse_namespace(text: str) -> Namespace:
    """Parse the text of a namespace.

    Raises:
        ConfigError: it has none of the forms above.
    """
    start = text.removesuffix("*")
    if start == text:
        return _namespace(text, text, depth=2)
    if start and start[-1] not in ":/":  # not part of a name: acme/po*
        raise _not_a_namespace(text)
    try:
        return _namespace(text, f"{start}x", depth=1)
    except ConfigError:
        return _namespace(text, f"{start}x/x", depth=0)


def _namespace(text: str, example: str, depth: int) -> Namespace:
    """Return the namespace of which `example` is a member, with a name and owner at most."""
    try:
        reference = parse_reference(example)
    except ConfigError:
        raise _not_a_namespace(text) from None
    if reference.kind == "folder" or reference.version:
        raise _not_a_namespace(text)
    owner, _, name = reference.name.lower().rpartition("/")
    return Namespace(canonical_place(reference), owner if depth else "", name if depth == 2 else "")


def _not_a_namespace(text: str) -> ConfigError:
    return ConfigError(f"{text!r} is not a namespace", expected=_FORMS)


def canonical_place(reference: Reference) -> str:
    """Return the place of a reference in one spelling: `hf:`, an origin, or `local`."""
    if reference.kind == "server":
        place = place_of_url(str(reference.host))
        return HUB if place in _OFFICIAL else place
    return HUB if reference.kind == "hub" else LOCAL


def place_of_url(url: str) -> str:
    """Return scheme, host and port of a URL in one spelling; "" if it has no host."""
    try:
        parts = urlsplit(url)
        port = (
            ""
            if parts.port in (None, {"https": 443, "http": 80}.get(parts.scheme))
            else (f":{parts.port}")
        )
    except ValueError:
        return ""
    host = (parts.hostname or "").rstrip(".")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{port}" if host else ""


def hub_endpoint() -> str:
    """Return the origin that `hf:` stands for."""
    from huggingface_hub import constants  # slow to import

    return place_of_url(constants.ENDPOINT)


def addresses(reference: Reference, endpoint: str | None = None) -> frozenset[str]:
    """Return all places that a published adapter is at.

    Args:
        reference: the adapter's reference, not a folder.
        endpoint: the origin that `hf:` stands for, if not this machine's.
    """
    if reference.kind == "local":
        return frozenset({LOCAL})
    mine = hub_endpoint()
    place = canonical_place(reference)
    if reference.kind == "hub":
        used = place_of_url(endpoint) if endpoint else mine
        return frozenset({HUB, *({used} - _OFFICIAL)})
    return frozenset({place, HUB} if place == mine else {place})

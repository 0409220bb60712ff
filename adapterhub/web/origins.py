"""Requests that a browser makes for a page of somebody else, to a server without tokens.

Such a server is for this machine only. A page on the internet can make a browser send requests to
it: under a name that resolves to this machine, or across origins. Both are seen in the headers.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from urllib.parse import urlsplit

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@lru_cache(maxsize=64)
def is_of_this_machine(host: str | None, origin: str | None) -> bool:
    """Return whether a request is for this machine by its headers Host and Origin."""
    if host is not None and not is_loopback_host(host):
        return False
    return origin is None or _is_loopback(origin)


def is_loopback_host(host: str) -> bool:
    """Return whether a header Host names this machine."""
    return _is_loopback(f"http://{host}")


def is_loopback_address(host: str) -> bool:
    """Return whether an address to listen at is reached from this machine alone."""
    try:
        return host in _LOOPBACK_NAMES or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_loopback(url: str) -> bool:
    try:
        return urlsplit(url).hostname in _LOOPBACK_NAMES
    except ValueError:
        return False

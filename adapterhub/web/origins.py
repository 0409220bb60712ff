"""Where a request comes from: the address of its client, and the page for which a browser made it.

Forwarded headers count only if a configured proxy wrote them. A page on the internet can make a
browser send requests to a server on this machine: under a name that resolves to this machine, or
across origins. Both are seen in the headers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
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


def is_own_form(headers: Mapping[str, str], base: str) -> bool:
    """Return whether a browser sent a form from a page of `base`, or no browser sent it."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    own = "/".join(base.split("/")[:3])
    return origin in (None, own) and site in ("none", "same-origin")


def client_address(peer: str, forwarded: Sequence[str], proxies: Iterable[str]) -> str:
    """Return the address of a client behind any number of configured proxies.

    Args:
        peer: the address at the other end of the connection.
        forwarded: the headers X-Forwarded-For, in their order.
        proxies: addresses, or networks, of the proxies whose headers are read.
    """
    found, networks = _plain_address(peer), tuple(proxies)
    hops = [hop.strip() for line in forwarded for hop in line.split(",")]
    while hops and is_among(found, networks):
        hop = _plain_address(hops.pop())
        if not hop:  # what is left of a text that is not an address, a client may have written
            break
        found = hop
    return found or peer


def is_among(address: str, networks: Iterable[str]) -> bool:
    """Return whether an address is one of these addresses, or in one of these networks."""
    plain = _plain_address(address)
    return bool(plain) and any(
        ipaddress.ip_address(plain) in network for network in map(_network, networks)
    )


@lru_cache(maxsize=64)
def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_network(text, strict=False)


def _plain_address(text: str) -> str:
    """Return an address without port, brackets and zone; "" for any other text."""
    host = text.partition("]")[0][1:] if text.startswith("[") else text
    if host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def _is_loopback(url: str) -> bool:
    try:
        return urlsplit(url).hostname in _LOOPBACK_NAMES
    except ValueError:
        return False

"""The process of a hub: where it listens, and how it starts and ends."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from adapterhub.errors import ConfigError
from adapterhub.hub.accounts import count_tokens
from adapterhub.hub.app import HubApp
from adapterhub.hub.database import HubPlace
from adapterhub.hub.registry_view import is_registry, viewing
from adapterhub.hub.state import Hub, HubOptions, create_hub, open_hub, serving_alone
from adapterhub.web.connections import (
    BACKLOG,
    ConnectionLimits,
    address_of,
    limited_protocol,
    listen,
)
from adapterhub.web.origins import is_among, is_loopback_address

_WRITE_SECONDS = 60.0
_STOP_SECONDS = 20


def serve_hub(
    place: HubPlace,
    host: str,
    port: int,
    options: HubOptions,
    started: Callable[[str], object] = lambda address: None,
    blobs: str | None = None,
) -> None:
    """Create a hub, unless there is one, and answer until the process is stopped.

    The folder of a registry is shown as a hub that only reads.

    Args:
        place: a folder, or a database of PostgreSQL, on which others may serve, too.
        host: the address to listen at.
        port: and its port; 0 for a free one.
        options: what the operator chose.
        started: receives the address when the hub answers.
        blobs: the bucket of a new hub in a database.

    Raises:
        ConfigError: it cannot be served as the options say, or the address is taken.
    """
    import uvicorn

    check_address(options.public_url, "--public-url")
    check_address(options.upstream, "--upstream")
    check_proxies(options.proxies)
    with ExitStack() as stack:
        listening = stack.enter_context(listen(host, port))
        known = known_hosts(host, listening.getsockname()[1])
        options = replace(options, hosts=(*options.hosts, *known))
        _check_upstream(options)
        hub = stack.enter_context(_opened(place, blobs, options, stack))
        if not (is_loopback_address(host) or options.open_reading):
            _require_token(hub, host)
        config = uvicorn.Config(
            HubApp(hub),
            lifespan="on",
            log_level="warning",
            access_log=False,
            proxy_headers=False,  # `HubCall.address` reads those of configured proxies
            server_header=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=_STOP_SECONDS,
        )
        config.load()
        limits = ConnectionLimits(is_proxy=partial(is_among, networks=options.proxies))
        config.http_protocol_class = limited_protocol(
            config.http_protocol_class, _WRITE_SECONDS, limits
        )
        with suppress(KeyboardInterrupt):  # it has stopped by then
            _telling_server(config, started).run([listening])


def _opened(
    place: HubPlace, blobs: str | None, options: HubOptions, stack: ExitStack
) -> AbstractContextManager[Hub]:
    """Return what opens a hub, which is created if there is none, or shows a registry."""
    if not isinstance(place, Path):
        create_hub(place, blobs)
        return open_hub(place, options)
    if is_registry(place):
        if options.upstream:
            raise ConfigError(
                f"{place} is a registry, which cannot keep what it mirrors",
                expected="the folder of a hub",
                hint=f"adapterhub hub import HUB {place}",
            )
        return viewing(place, options)
    create_hub(place, blobs)
    stack.enter_context(serving_alone(place))
    return open_hub(place, options)


def _require_token(hub: Hub, host: str) -> None:
    """Refuse to listen to others where nobody could be told from anybody.

    Raises:
        ConfigError: the hub has no token.
    """
    with hub.database.reading() as connection:
        if count_tokens(connection):
            return
    raise ConfigError(
        f"others could reach {host}, and this hub has no token yet",
        hint=f"adapterhub hub user {hub.place} NAME --admin, then adapterhub hub token create "
        f"{hub.place} --user NAME; or --open-reading, where all may read and nobody writes",
    )


def known_hosts(host: str, port: int) -> tuple[str, ...]:
    """Return the names that a hub is asked by where it listens."""
    if host in ("0.0.0.0", "::", ""):  # every address of the machine: which is for --public-url
        return ()
    shown = f"[{host}]" if ":" in host else host
    return (f"{shown}:{port}", shown)


def _check_upstream(options: HubOptions) -> None:
    """Refuse an upstream that would be asked by itself.

    Raises:
        ConfigError: it is this hub.
    """
    own = urlsplit(options.public_url or "").netloc
    if options.upstream and urlsplit(options.upstream).netloc in {own, *options.hosts}:
        raise ConfigError(
            f"{options.upstream} is this hub itself", expected="another hub", hint="--upstream"
        )


def check_address(url: str | None, option: str) -> None:
    """Refuse an address that clients could not use.

    Raises:
        ConfigError: it is no URL of http or https.
    """
    if url is None:
        return
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(
            f"{url!r} is not the address of a hub",
            expected="https://hub.example.org, or with a path",
            hint=option,
        )


def check_proxies(proxies: Sequence[str]) -> None:
    """Refuse proxies that are not addresses.

    Raises:
        ConfigError: one is neither an address nor a network.
    """
    for proxy in proxies:
        try:
            ipaddress.ip_network(proxy, strict=False)
        except ValueError:
            raise ConfigError(
                f"--trusted-proxy {proxy!r} is not an address",
                expected="an address, such as 10.0.0.5, or a network, such as 10.0.0.0/24",
            ) from None


def _telling_server(config: Any, started: Callable[[str], object]) -> Any:
    """Return a server of uvicorn that says when it answers."""
    import uvicorn

    class Told(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                started(address_of(sockets[0]))

    return Told(config)

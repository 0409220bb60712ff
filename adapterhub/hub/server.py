"""The process of a hub: where it listens, and how it starts and ends."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from adapterhub.errors import ConfigError
from adapterhub.hub.accounts import count_tokens
from adapterhub.hub.app import HubApp
from adapterhub.hub.registry_view import is_registry, viewing
from adapterhub.hub.state import Hub, HubOptions, create_hub, open_hub, serving_alone
from adapterhub.web.connections import limited_protocol

_WRITE_SECONDS = 60.0
_STOP_SECONDS = 20


def serve_hub(
    folder: Path,
    host: str,
    port: int,
    options: HubOptions,
    started: Callable[[str], object] = lambda address: None,
) -> None:
    """Create the hub of a folder, unless there is one, and answer until the process is stopped.

    The folder of a registry is shown as a hub that only reads.

    `started` receives the address when the hub answers.

    Raises:
        ConfigError: it cannot be served as the options say.
    """
    import uvicorn

    check_address(options.public_url)
    options = replace(options, hosts=(*options.hosts, *known_hosts(host, port)))
    with ExitStack() as stack:
        if is_registry(folder):
            hub = stack.enter_context(viewing(folder, options))
        else:
            create_hub(folder)
            stack.enter_context(serving_alone(folder))
            hub = stack.enter_context(open_hub(folder, options))
        if not (is_loopback_address(host) or options.open_reading):
            _require_token(hub, folder, host)
        config = uvicorn.Config(
            HubApp(hub),
            host=host,
            port=port,
            http=_protocol(),
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_STOP_SECONDS,
        )
        with suppress(KeyboardInterrupt):  # it has stopped by then
            _telling_server(config, started).run()


def _require_token(hub: Hub, folder: Path, host: str) -> None:
    """Refuse to listen to others where nobody could be told from anybody.

    Raises:
        ConfigError: the hub has no token.
    """
    with hub.database.reading() as connection:
        if count_tokens(connection):
            return
    raise ConfigError(
        f"others could reach {host}, and this hub has no token yet",
        hint=f"adapterhub hub user {folder} NAME --admin, then adapterhub hub token create {folder}"
        " --user NAME; or --open-reading, where all may read and nobody writes",
    )


def known_hosts(host: str, port: int) -> tuple[str, ...]:
    """Return the names that a hub is asked by where it listens."""
    if host in ("0.0.0.0", "::", ""):  # every address of the machine: which is for --public-url
        return ()
    shown = f"[{host}]" if ":" in host else host
    return (f"{shown}:{port}", shown)


def check_address(url: str | None) -> None:
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
            hint="--public-url",
        )


def is_loopback_address(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _protocol() -> type[Any]:
    """Return the protocol of HTTP, with limits; the fast parser where it is installed."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Fast

        return limited_protocol(Fast, _WRITE_SECONDS)
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return limited_protocol(H11Protocol, _WRITE_SECONDS)


def _telling_server(config: Any, started: Callable[[str], object]) -> Any:
    """Return a server of uvicorn that says when it answers."""
    import uvicorn

    class Told(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                host, port = self.servers[0].sockets[0].getsockname()[:2]
                started(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return Told(config)

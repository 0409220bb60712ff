"""Endpoints for operators of a server: health, metrics, refresh and documentation."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response

from adapterhub.serving.http.openapi import documentation, openapi
from adapterhub.serving.http.request import AdapterFacts, Call
from adapterhub.web.errors import NotReadyError
from adapterhub.web.frame import Endpoint, page_response

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def _healthz(call: Call) -> dict[str, Any]:
    if not call.service.is_alive:
        raise NotReadyError("nothing is computed: the compute thread is dead or stuck")
    return {"status": "alive"}


async def _readyz(call: Call) -> dict[str, Any]:
    if not call.is_ready:
        raise NotReadyError(
            "the server is starting up or shutting down, or its compute thread has stopped"
        )
    return {"status": "ready"}


async def _metrics(call: Call) -> Response:
    return Response(call.service.metrics.text(), media_type=METRICS_TYPE)


async def _refresh(call: Call) -> dict[str, Any]:
    return {"moved": await asyncio.to_thread(call.service.refresh)}


async def _openapi(call: Call) -> dict[str, Any]:
    has_tokens = call.service.tokens is not None
    return openapi(call.service.endpoints, _shown(call), has_tokens=has_tokens)


async def _paths(call: Call) -> dict[str, Any] | Response:
    if "text/html" in call.request.headers.get("accept", ""):
        return await _docs(call)
    paths = {each.shown: each.summary for each in call.service.endpoints}
    return {"server": "adapterhub serve", "documentation": "/docs", "paths": paths}


async def _docs(call: Call) -> Response:
    has_tokens = call.service.tokens is not None
    address = str(call.request.base_url).rstrip("/")
    page = documentation(call.service.endpoints, _shown(call), address, has_tokens=has_tokens)
    return page_response(page)


def _shown(call: Call) -> list[AdapterFacts]:
    """Return the loaded adapters that a page shows; empty for clients without a token."""
    if call.service.tokens is not None and call.token is None:
        return []
    return call.loaded()


def operations(metrics: str = "predict") -> tuple[Endpoint, ...]:
    """Return the endpoints for operators.

    `metrics` is the role that may read the metrics; "": everyone; "off": no one.
    """
    return tuple(
        Endpoint(
            method, path, answer, role, summary=summary, tags=("operations",), while_starting=True
        )
        for method, path, summary, answer, role in (
            ("GET", "/healthz", "Whether requests are computed", _healthz, ""),
            ("GET", "/readyz", "Whether the server is loaded and warm", _readyz, ""),
            ("GET", "/metrics", "Numbers for Prometheus", _metrics, metrics),
            ("POST", "/admin/refresh", "Look for new versions now", _refresh, "admin"),
            ("GET", "/openapi.json", "This description, for programs", _openapi, ""),
            ("GET", "/", "The paths of this server", _paths, ""),
            ("GET", "/docs", "This description, for people", _docs, ""),
        )
        if role != "off"
    )

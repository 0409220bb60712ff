"""One line for each request of a server, as JSON: what was asked of whom, and how long it took.

It has no text, no token, and nothing else that a client chooses freely: the path is that of the
endpoint, and an id of a trace is in it only if it has the form of one.
"""

from __future__ import annotations

import json
import logging
import re
from html import unescape
from typing import Any

from starlette.responses import Response

_POLICY = re.compile('http-equiv="Content-Security-Policy" content="([^"]*)"')
SECURE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"same-origin"),
)
"""What every answer has, as bytes."""


def page_response(page: str, status: int = 200) -> Response:
    """Return a page of ours, with its own policy as a header, which also forbids frames."""
    policy = _POLICY.search(page)
    assert policy is not None, "each page has a policy: pages/head.html"
    headers = {"content-security-policy": f"{unescape(policy[1])}; frame-ancestors 'none'"}
    data = page.encode("utf-8", "replace")
    return Response(data, status, headers, "text/html; charset=utf-8")


log = logging.getLogger("adapterhub.requests")
_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def trace_of(traceparent: str | None) -> str:
    """Return the id of a trace in a header of W3C's trace context, or ""."""
    found = _TRACE.fullmatch(traceparent) if traceparent else None
    return found[1] if found else ""


def log_request(**facts: Any) -> None:
    """Write the line of a request; facts that are empty are left out."""
    known = {name: value for name, value in facts.items() if value not in ("", None)}
    log.info("%s", json.dumps(known))


def logs_requests() -> bool:
    """Return whether lines of requests are written."""
    return log.isEnabledFor(logging.INFO)

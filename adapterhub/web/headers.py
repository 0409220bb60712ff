"""Headers that all answers of our servers have, and those of pages."""

from __future__ import annotations

import re
from html import unescape

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

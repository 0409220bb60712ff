"""Headers that all answers of our servers have, and those of pages."""

from __future__ import annotations

SECURE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
)
"""What every answer has, as bytes."""
_NOTHING = "default-src 'none'"


def page_headers(page: str) -> dict[str, str]:
    """Return the headers of a page: its own policy, and what a page cannot say of itself."""
    policy = page.partition('Content-Security-Policy" content="')[2].partition('"')[0]
    return {"content-security-policy": f"{policy or _NOTHING}; frame-ancestors 'none'"}

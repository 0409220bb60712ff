"""Headers that all answers of our servers have, and those of pages."""

from __future__ import annotations

SECURE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
)
"""What every answer has, as bytes."""


def page_headers(script: str = "") -> dict[str, str]:
    """Return the headers of a page, which may have one script, by its hash, and asks only us."""
    scripts = f"script-src '{script}'; connect-src 'self'; " if script else ""
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; {scripts}base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    return {"content-security-policy": policy}

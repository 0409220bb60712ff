"""Headers that all answers of our servers have, and those of pages."""

from __future__ import annotations

SECURE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
)
"""What every answer has, as bytes."""


PAGE_TYPE = "text/html; charset=utf-8"


def page_headers(page: str) -> dict[str, str]:
    """Return the headers of a page, which asks only us; its own policy has the hash of a script."""
    script = page.partition("script-src '")[2].partition("'")[0]
    scripts = f"script-src '{script}'; connect-src 'self'; " if script else ""
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; {scripts}base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    return {"content-security-policy": policy}

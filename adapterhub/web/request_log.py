"""One line for each request of a server, as JSON: what was asked of whom, and how long it took.

It has no text, no token, and nothing else that a client chooses freely: the path is that of the
endpoint, and an id of a trace is in it only if it has the form of one.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any

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

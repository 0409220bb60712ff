"""Serve adapters over HTTP: the walk of a request, and one file for the shapes of each client.

`lifecycle.py` has the steps of the walk. A shape is a list of endpoints: it says what a client
sends and gets, and knows neither tokens, limits nor metrics. What is computed belongs in the
engine.
"""

from __future__ import annotations

import importlib.util

from adapterhub.errors import ConfigError

_NEEDED = ("starlette", "uvicorn", "pydantic", "prometheus_client")


def check_serve_extra() -> None:
    """Refuse to serve without the libraries of the extra `serve`.

    Raises:
        ConfigError: some are missing.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"adapterhub serve needs {', '.join(missing)}, which is not installed",
            hint='pip install "adapterhub[serve]"',
        )

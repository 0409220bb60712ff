"""Serve adapters over HTTP: the steps of a request, and one file for the API of each client.

`server.py` implements the steps. An API is a list of endpoints that defines requests and
responses. It does not handle tokens, limits or metrics. Computation belongs in the engine.
"""

from __future__ import annotations

import importlib.util

from adapterhub.errors import ConfigError

_NEEDED = ("starlette", "uvicorn", "pydantic", "prometheus_client")


def check_serve_extra() -> None:
    """Check that the libraries of the extra `serve` are installed.

    Raises:
        ConfigError: a library is missing.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"adapterhub serve needs {', '.join(missing)}, which is not installed",
            hint='pip install "adapterhub[serve]"',
        )

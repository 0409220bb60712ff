"""A client of a server in tests: one request, its status, headers and JSON."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class HttpAnswer:
    """What a server has answered."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.data)

    @property
    def message(self) -> str:
        """The words of an error, in either form."""
        error = self.json["error"]
        return str(error["message"] if isinstance(error, dict) else error)


def ask(
    url: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    method: str | None = None,
    seconds: float = 60,
) -> HttpAnswer:
    """Send a request, with a body as JSON unless it is bytes."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=seconds)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers or {})
        answer = connection.getresponse()
        return HttpAnswer(answer.status, dict(answer.headers), answer.read())
    finally:
        connection.close()


def predict(url: str, model: str, *inputs: Any, **more: Any) -> HttpAnswer:
    """Ask /v1/predict; `token` is sent as a header."""
    token = more.pop("token", None)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return ask(url, "/v1/predict", {"model": model, "inputs": list(inputs), **more}, headers)

"""The application: the walk of a request, from its path to the bytes of the answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from adapterhub.serving.http.call import Answered, Call, Endpoint, adapter_headers
from adapterhub.serving.http.errors import (
    LimitError,
    NotReadyError,
    Problem,
    Status,
    body_of,
    problem_of,
)
from adapterhub.serving.http.hugging_face import ENDPOINTS as HUGGING_FACE
from adapterhub.serving.http.inference_protocol import ENDPOINTS as INFERENCE_PROTOCOL
from adapterhub.serving.http.lora_updates import ENDPOINTS as LORA_UPDATES
from adapterhub.serving.http.openai_embeddings import ENDPOINTS as OPENAI_EMBEDDINGS
from adapterhub.serving.http.openai_generation import ENDPOINTS as OPENAI_GENERATION
from adapterhub.serving.http.predict import ENDPOINTS as PREDICT
from adapterhub.serving.http.scoring import ENDPOINTS as SCORING
from adapterhub.serving.http.service import Service
from adapterhub.serving.http.text_embeddings import ENDPOINTS as TEXT_EMBEDDINGS

log = logging.getLogger("adapterhub.serve")

ENDPOINTS: tuple[Endpoint, ...] = (
    *PREDICT,
    *OPENAI_GENERATION,
    *OPENAI_EMBEDDINGS,
    *SCORING,
    *TEXT_EMBEDDINGS,
    *HUGGING_FACE,
    *INFERENCE_PROTOCOL,
    *LORA_UPDATES,
)
"""All paths that clients may ask for; a client's own shape is one file more here."""


def make_app(service: Service, endpoints: Sequence[Endpoint] = ENDPOINTS) -> Starlette:
    """Return the application of a service."""
    service.endpoints = tuple(endpoints)
    routes = [
        Route(each.path, _Handler(service, each), methods=[each.method]) for each in endpoints
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _unknown_path})


class _Handler:
    """Answers all requests to one endpoint."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        self.service, self.endpoint = service, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(self.service, self.endpoint, Request(scope, receive))
        try:
            call.raw_body = await read_body(receive, self.service.limits.body)
        except ClientLeftError:
            return
        except LimitError as error:
            await self._problem(error, scope)(scope, receive, send)
            return
        leaving = asyncio.create_task(_cancel_when_left(receive, asyncio.current_task()))
        try:
            response = await self._answer(call)
            await response(scope, receive, send)
        except asyncio.CancelledError:
            if not leaving.done():
                raise
        finally:
            leaving.cancel()
            for each in call.generations:
                each.cancel()

    async def _answer(self, call: Call) -> Response:
        try:
            if not (self.service.is_ready or self.endpoint.while_starting):
                raise NotReadyError("the server is starting, or leaving")
            if self.endpoint.read is not None:
                call.body = self.endpoint.read(call)
            elif self.endpoint.request is not None:
                call.body = self.endpoint.request.model_validate_json(call.raw_body)
            response = rendered(await self.endpoint.answer(call))
        except Exception as error:
            response = self._problem(error, call.request.scope)
        if call.facts_of_answer is not None:
            response.headers.update(adapter_headers(call.facts_of_answer))
        return response

    def _problem(self, error: Exception, scope: Scope) -> Response:
        problem = problem_of(error)
        if problem.status.code >= 500:
            log.exception("%s: %s", self.endpoint.path, type(error).__name__, exc_info=error)
        return problem_response(problem, scope["path"])


class ClientLeftError(Exception):
    """The client has closed the connection."""


async def read_body(receive: Receive, limit: int) -> bytes:
    """Read the body of a request.

    Raises:
        LimitError: it has more bytes.
        ClientLeftError: it does not end.
    """
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        more = message.get("more_body", False)
        if size > limit:
            raise LimitError("the body is too large", expected=f"at most {limit:,} bytes")
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def _cancel_when_left(receive: Receive, task: asyncio.Task[Any] | None) -> None:
    """Cancel a task when the client has closed its connection."""
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()
    if task is not None:
        task.cancel()


def rendered(answer: Answered) -> Response:
    """Return an answer as JSON, unless it is a response already."""
    if isinstance(answer, Response):
        return answer
    return Response(to_json(answer), media_type="application/json")


def problem_response(problem: Problem, path: str) -> Response:
    """Return an error in the form that clients of a path read."""
    return Response(
        to_json(body_of(problem, path)),
        problem.status.code,
        problem.headers,
        media_type="application/json",
    )


async def _unknown_path(request: Request, error: Exception) -> Response:
    """Answer for a path, or a method, that there is none of."""
    assert isinstance(error, HTTPException)
    status = Status(error.status_code, "not_found")
    problem = Problem(status, error.detail, dict(error.headers or {}))
    return problem_response(problem, request.url.path)

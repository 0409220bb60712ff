"""The application: the walk of a request, from its path to the bytes of the answer.

`_Handler.__call__` is the walk: who asks, what the body is, what the endpoint answers, and what is
counted and logged of it. Errors become answers in `errors.py`, in one table.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Sequence
from functools import partial

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from adapterhub.errors import AdapterhubError
from adapterhub.serving.http.common import ClientRequest
from adapterhub.serving.http.errors import (
    HeadError,
    LimitError,
    NoTokenError,
    NotReadyError,
    Problem,
    RefusedError,
    SlowError,
    Status,
    body_of,
    problem_of,
)
from adapterhub.serving.http.hugging_face import ENDPOINTS as HUGGING_FACE
from adapterhub.serving.http.inference_protocol import ENDPOINTS as INFERENCE_PROTOCOL
from adapterhub.serving.http.lora_updates import ENDPOINTS as LORA_UPDATES
from adapterhub.serving.http.metrics import OTHER
from adapterhub.serving.http.openai_embeddings import ENDPOINTS as OPENAI_EMBEDDINGS
from adapterhub.serving.http.openai_generation import ENDPOINTS as OPENAI_GENERATION
from adapterhub.serving.http.predict import ENDPOINTS as PREDICT
from adapterhub.serving.http.request import AdapterFacts, Answered, Call, Endpoint
from adapterhub.serving.http.scoring import ENDPOINTS as SCORING
from adapterhub.serving.http.server_state import Service
from adapterhub.serving.http.text_embeddings import ENDPOINTS as TEXT_EMBEDDINGS
from adapterhub.web.connections import MOST_HEADER_BYTES, is_of_this_machine
from adapterhub.web.request_log import SECURE_HEADERS, log_request, logs_requests, trace_of

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
LEFT = 499  # the status of a request whose client has left, in metrics and logs
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
BODY_SECONDS = 30.0  # that a body may take to come


def make_app(service: Service, endpoints: Sequence[Endpoint]) -> Starlette:
    """Return the application of a service."""
    service.endpoints = tuple(endpoints)
    routes = [
        Route(each.path, _Handler(service, each), methods=[each.method])
        for each in service.endpoints
    ]
    allowed = Middleware(
        CORSMiddleware,
        allow_origins=sorted(service.origins),
        allow_methods=("GET", "POST"),
        allow_headers=("authorization", "content-type", "x-adapter"),
        expose_headers=("x-adapter-version", "x-adapter-digest", "retry-after"),
    )
    return Starlette(
        routes=routes,
        exception_handlers={HTTPException: partial(_unknown_path, service)},
        middleware=[allowed] if service.origins else [],
    )


class _Handler:
    """Answers all requests to one endpoint."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        self.service, self.endpoint = service, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and count and log it."""
        status, call = LEFT, Call(self.service, self.endpoint, Request(scope, receive))
        try:
            response = await self._answer(call, receive)
            await response(scope, receive, send)
            status = response.status_code
        except ClientDisconnect:
            pass  # there is nobody to answer
        except asyncio.CancelledError:
            if not call.has_left:
                raise
        finally:
            call.end()
            self._note(call, status, time.perf_counter() - call.began)

    async def _answer(self, call: Call, receive: Receive) -> Response:
        """Return the answer to a call, or its error as one."""
        try:
            admit(call)
            call.raw_body = await read_body(call.request, self.service.limits.body)
            call.watch(receive)
            call.body = await call.in_thread(partial(read_call, call))
            response = rendered(await self.endpoint.answer(call))
        except ClientDisconnect:
            raise
        except Exception as error:
            response = self._error(error, call.request.url.path)
        if call.facts_of_answer is not None:
            response.headers.update(adapter_headers(call.facts_of_answer))
        response.raw_headers.extend(SECURE_HEADERS)
        if self.service.is_leaving:
            response.headers["connection"] = "close"
        return response

    def _error(self, error: Exception, path: str) -> Response:
        problem = problem_of(error)
        if not isinstance(error, AdapterhubError | ValidationError):
            # Its words may quote an input: the log has where it was raised, and of what class.
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("%s: %s\n%s", self.endpoint.path, type(error).__name__, where)
        elif problem.status.code >= 500 and not problem.status.retry:
            log.error("%s: %s", self.endpoint.path, error)
        return error_response(problem, path)

    def _note(self, call: Call, status: int, seconds: float) -> None:
        facts, path = call.facts_of_answer, self.endpoint.path
        task, reference = (facts.task, facts.reference) if facts else ("", "")
        self.service.metrics.observe_request(path, task, reference, status, seconds, call.rows)
        if logs_requests():
            log_request(
                method=self.endpoint.method,
                path=path,
                status=status,
                ms=round(1000 * seconds, 2),
                adapter=reference,
                inputs=call.rows,
                token=call.token.name if call.token else "",
                trace=trace_of(call.headers.get("traceparent")),
            )


def admit(call: Call) -> None:
    """Refuse a request before its body is read: by its head, its token, or the server's state.

    Raises:
        AdapterhubError: it is refused.
    """
    service, role = call.service, call.endpoint.role
    head = sum(len(name) + len(value) for name, value in call.request.scope["headers"])
    if head > MOST_HEADER_BYTES:
        raise HeadError("the headers are too large", expected=f"{MOST_HEADER_BYTES:,} bytes")
    if service.tokens is not None:
        call.token = service.check_token(call.headers.get("authorization"))
        if role and call.token is None:
            raise NoTokenError("no valid token", hint="the header Authorization: Bearer TOKEN")
        if role and call.token is not None and role not in call.token.roles:
            raise RefusedError(f"this token has not the role {role}")
    elif not is_of_this_machine(call.headers.get("host"), _foreign_origin(call)):
        raise RefusedError(
            "a server without tokens answers this machine alone",
            expected="the headers Host and Origin of localhost",
        )
    if not (service.is_ready or service.is_leaving or call.endpoint.while_starting):
        raise NotReadyError("the server is starting")
    if role:
        service.rate.take(call.token.name if call.token else "")


def _foreign_origin(call: Call) -> str | None:
    """Return the origin of the page that asks, unless the operator has allowed it."""
    origin: str | None = call.headers.get("origin")
    return None if origin in call.service.origins else origin


def read_call(call: Call) -> BaseModel | None:
    """Return the body of a call as its endpoint reads it.

    Raises:
        ValidationError: it is of another form.
        RequestError: a field would be ignored.
    """
    body: BaseModel | None = None
    if call.endpoint.read is not None:
        body = call.endpoint.read(call)
    elif call.endpoint.request is not None:
        body = call.endpoint.request.model_validate_json(call.raw_body)
    if isinstance(body, ClientRequest):
        body.check()
    return body


async def read_body(request: Request, limit: int) -> bytes:
    """Read the body of a request.

    Raises:
        LimitError: it has more bytes.
        SlowError: it does not come in time.
        ClientDisconnect: it does not end.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit:
        raise _too_large(limit)
    task, is_late = asyncio.current_task(), []
    assert task is not None

    def end() -> None:
        is_late.append(True)
        task.cancel()

    timer = asyncio.get_running_loop().call_later(BODY_SECONDS, end)
    try:
        return await _whole_body(request, limit)
    except asyncio.CancelledError:
        if not is_late:
            raise
        raise SlowError("the body does not come in time") from None
    finally:
        timer.cancel()


async def _whole_body(request: Request, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit: int) -> LimitError:
    return LimitError("the body is too large", expected=f"at most {limit:,} bytes")


def adapter_headers(facts: AdapterFacts) -> dict[str, str]:
    """Return the headers that say which version of an adapter has answered."""
    reference = facts.reference.encode("ascii", "backslashreplace").decode()
    return {"x-adapter-version": reference, "x-adapter-digest": facts.digest}


def rendered(answer: Answered) -> Response:
    """Return an answer as JSON, unless it is a response already."""
    if isinstance(answer, Response):
        return answer
    return Response(to_json(answer), media_type="application/json")


def error_response(problem: Problem, path: str) -> Response:
    """Return an error in the form that clients of a path read."""
    body = to_json(body_of(problem, path))
    return Response(body, problem.status.code, problem.headers, media_type="application/json")


async def _unknown_path(service: Service, request: Request, error: Exception) -> Response:
    """Answer for a path, or a method, that there is none of; count and log it."""
    assert isinstance(error, HTTPException)
    problem = Problem(
        Status(error.status_code, "not_found"), error.detail, dict(error.headers or {})
    )
    response = error_response(problem, request.url.path)
    response.raw_headers.extend(SECURE_HEADERS)
    service.metrics.observe_request(OTHER, "", "", error.status_code, 0.0, 0)
    if logs_requests():
        log_request(
            method=request.method if request.method in _METHODS else "unknown",
            path="unknown",
            status=error.status_code,
            trace=trace_of(request.headers.get("traceparent")),
        )
    return response

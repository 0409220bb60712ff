"""The application: all paths that clients may request, and the steps of their walk (web/frame.py).

Errors become answers in `errors.py`, in one table.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json
from starlette.datastructures import URL
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp

from adapterhub.errors import AdapterhubError
from adapterhub.serving.http.errors import (
    HeadError,
    NoPathError,
    NoTokenError,
    NotReadyError,
    Problem,
    RefusedError,
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
from adapterhub.serving.http.request import AdapterFacts, Answered, Call
from adapterhub.serving.http.scoring import ENDPOINTS as SCORING
from adapterhub.serving.http.server_state import Service
from adapterhub.serving.http.text_embeddings import ENDPOINTS as TEXT_EMBEDDINGS
from adapterhub.web.connections import MOST_HEADER_BYTES, is_of_this_machine
from adapterhub.web.frame import SECURE_HEADERS, Endpoint, WebFrame, match_endpoint, place_of

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
BODY_SECONDS = 30.0  # that a body may take to come


def make_app(service: Service, endpoints: Sequence[Endpoint]) -> ASGIApp:
    """Return the application of a service."""
    service.endpoints = tuple(endpoints)
    app = ServingApp(service)
    if not service.origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=sorted(service.origins),
        allow_methods=("GET", "POST"),
        allow_headers=("authorization", "content-type", "x-adapter"),
        expose_headers=("x-adapter-version", "x-adapter-digest", "retry-after"),
    )


class ServingApp(WebFrame[Call]):
    """Answers for a service."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def find(self, request: Request) -> Call:
        """Return the call of an endpoint; what answers GET answers HEAD.

        Raises:
            NoPathError: there is no such path, or not with this method.
        """
        path, known = request.scope["path"], self.service.endpoints
        method = "GET" if request.method == "HEAD" else request.method
        endpoint, values, methods = match_endpoint(known, method, path)
        if endpoint is None:
            raise NoPathError(methods)
        return Call(service=self.service, request=request, endpoint=endpoint, values=values)

    async def admit(self, call: Call) -> None:
        """Refuse a request by its head, its token, or the server's state.

        Raises:
            AdapterhubError: it is refused.
        """
        service, role = self.service, call.endpoint.role
        head = sum(len(name) + len(value) for name, value in call.request.scope["headers"])
        if head > MOST_HEADER_BYTES:
            raise HeadError("the headers are too large", expected=f"{MOST_HEADER_BYTES:,} bytes")
        if service.tokens is not None:
            call.token = service.check_token(call.headers.get("authorization"))
            if role and call.token is None:
                raise NoTokenError("no valid token", hint="the header Authorization: Bearer TOKEN")
            if role and call.token is not None and role not in call.token.roles:
                raise RefusedError(f"this token has not the role {role}")
        elif not is_of_this_machine(call.headers.get("host"), self._foreign_origin(call)):
            raise RefusedError(
                "a server without tokens answers this machine alone",
                expected="the headers Host and Origin of localhost",
            )
        if not (service.is_ready or service.is_leaving or call.endpoint.while_starting):
            raise NotReadyError("the server is starting")
        if role:
            service.rate.take(call.token.name if call.token else "")

    def _foreign_origin(self, call: Call) -> str | None:
        """Return the origin of the page that asks, unless the operator has allowed it."""
        origin: str | None = call.headers.get("origin")
        return None if origin in self.service.origins else origin

    async def read(self, call: Call) -> bytes:
        """Read the body."""
        return await call.read_body(self.service.limits.body, BODY_SECONDS)

    async def answer(self, call: Call) -> Response:
        """Return what an endpoint answers; a client that leaves ends what is computed for it."""
        call.watch()
        call.body = await call.in_thread(call.read_form)
        return rendered(await call.endpoint.answer(call))

    def refused(self, request: Request, call: Call | None, error: Exception) -> Response:
        """Return an error in the form that clients of a path read."""
        if isinstance(error, NoPathError) and (other := self._other_path(request)):
            return other
        problem = problem_of(error)
        path = call.endpoint.path if call else request.method
        if not isinstance(error, AdapterhubError | ValidationError):
            log.error("%s: %s", path, place_of(error))
        elif problem.status.code >= 500 and not problem.status.retry:
            log.error("%s: %s", path, error)
        return error_response(problem, request.url.path)

    def _other_path(self, request: Request) -> Response | None:
        """Return the redirect to a path that has a slash more at its end, or less."""
        path = request.scope["path"]
        other = path.rstrip("/") if path.endswith("/") else f"{path}/"
        if path == "/" or not match_endpoint(self.service.endpoints, "", other)[2]:
            return None
        return RedirectResponse(str(URL(scope={**request.scope, "path": other})))

    def complete(self, call: Call | None, response: Response) -> None:
        """Add which version of an adapter has answered, and the headers that every answer has."""
        if call is not None and call.facts_of_answer is not None:
            response.headers.update(adapter_headers(call.facts_of_answer))
        response.raw_headers.extend(SECURE_HEADERS)
        if self.service.is_leaving:
            response.headers["connection"] = "close"

    def count(self, method: str, call: Call | None, status: int, seconds: float) -> None:
        """Count a request by its path and its adapter."""
        facts = call.facts_of_answer if call else None
        task, reference = (facts.task, facts.reference) if facts else ("", "")
        path, rows = (call.endpoint.path, call.rows) if call else (OTHER, 0)
        self.service.metrics.observe_request(path, task, reference, status, seconds, rows)

    def log_facts(self, call: Call) -> dict[str, Any]:
        """Return which adapter has answered whom."""
        return {
            "adapter": call.facts_of_answer.reference if call.facts_of_answer else "",
            "inputs": call.rows,
            "token": call.token.name if call.token else "",
        }


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

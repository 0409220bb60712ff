"""Status and message of each error, in one table, and the error format of each API.

Client errors are returned in full. Errors of an adapter or the server may name folders of this
machine: the client receives one sentence, and the rest is logged.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from adapterhub.errors import (
    BackboneError,
    ConfigError,
    DataError,
    FileError,
    MismatchError,
    NotPublishedError,
    RegistryError,
    ServingError,
    SignatureError,
    YankedError,
)
from adapterhub.serving.errors import (
    ComputationError,
    DeadlineError,
    OverloadedError,
    StoppedError,
    TooLargeError,
)
from adapterhub.serving.http.access import UnknownAdapterError
from adapterhub.web.frame import LimitError, SlowError


class RequestError(ConfigError):
    """A request has an invalid or unsupported value.

    Attributes:
        parameter: the field of the body.
    """

    def __init__(self, problem: str, *, parameter: str, expected: str = "", hint: str = "") -> None:
        self.parameter = parameter
        super().__init__(problem, expected=expected, hint=hint)


class UnservableError(ServingError):
    """An adapter's files match the published ones, but cannot be served."""


class WrongShapeError(ServingError):
    """A path does not support the adapter's task; the error names a path that does."""


class RefusedError(ServingError):
    """The client is not allowed to make this request."""


class HeadError(ServingError):
    """The headers of a request are too large."""


class NoPathError(ServingError):
    """A path does not exist, or does not accept the method.

    Attributes:
        methods: the methods that the path accepts.
    """

    def __init__(self, methods: Set[str]) -> None:
        self.methods = {*methods, *(["HEAD"] if "GET" in methods else [])}
        super().__init__("Method Not Allowed" if methods else "Not Found")


class NoTokenError(ServingError):
    """A request lacks a valid token."""


class NotReadyError(ServingError):
    """The server is starting or shutting down."""


class RateError(ServingError):
    """A token has made too many requests.

    Attributes:
        wait: the seconds until the next request is accepted.
    """

    def __init__(self, per_minute: int, wait: float) -> None:
        self.wait = wait
        super().__init__(
            f"more than {per_minute:,} requests in a minute",
            hint=f"the same request again in {max(wait, 0.1):.1f} s",
        )


@dataclass(frozen=True)
class Status:
    """Response for a class of errors.

    Attributes:
        code: the HTTP status code.
        name: a machine-readable name.
        words: the message that replaces the error's; "": the error's own message.
        retry: whether the same request may succeed later.
    """

    code: int
    name: str
    words: str = ""
    retry: bool = False


STATUSES: dict[type[BaseException], Status] = {
    ConfigError: Status(400, "invalid_request"),
    DataError: Status(400, "invalid_input"),
    WrongShapeError: Status(400, "wrong_shape"),
    NoTokenError: Status(401, "no_valid_token"),
    RefusedError: Status(403, "not_allowed"),
    UnknownAdapterError: Status(404, "adapter_not_found"),
    NotPublishedError: Status(404, "adapter_not_found"),
    SlowError: Status(408, "too_slow"),
    MismatchError: Status(409, "backbone_mismatch"),
    YankedError: Status(410, "adapter_yanked"),
    LimitError: Status(413, "too_large"),
    OverloadedError: Status(429, "overloaded", retry=True),
    RateError: Status(429, "too_many_requests", retry=True),
    HeadError: Status(431, "head_too_large"),
    ComputationError: Status(500, "not_finite"),
    FileError: Status(502, "adapter_not_valid", "the files of the adapter are not valid"),
    SignatureError: Status(502, "adapter_not_signed", "the adapter has no valid signature"),
    UnservableError: Status(502, "adapter_not_served", "the adapter cannot be served as it is"),
    BackboneError: Status(502, "backbone_not_loaded", "the adapter's backbone cannot be loaded"),
    RegistryError: Status(503, "registry_unreachable", "the registry cannot be read", retry=True),
    NotReadyError: Status(503, "not_ready", retry=True),
    StoppedError: Status(503, "not_ready", "the server does not compute now", retry=True),
    DeadlineError: Status(504, "deadline_passed", retry=True),
    TooLargeError: Status(507, "out_of_memory"),
}
"""Status of each class of errors; the first class in an error's MRO that is listed applies."""

_UNEXPECTED = Status(500, "internal_error", "an error of the server, which its log has")


def status_of(error: BaseException) -> Status:
    """Return the status of an error."""
    known = (STATUSES[each] for each in type(error).__mro__ if each in STATUSES)
    return next(known, _UNEXPECTED)


@dataclass(frozen=True)
class Problem:
    """Error as sent to a client: status, message and headers."""

    status: Status
    message: str
    headers: dict[str, str]
    place: str = ""


def problem_of(error: BaseException) -> Problem:
    """Return an error in the form sent to a client."""
    if isinstance(error, ValidationError):
        places = [(_place(each["loc"]), each["msg"]) for each in error.errors()[:10]]
        message = "; ".join(f"{place}: {words}".lstrip(": ") for place, words in places)
        return Problem(Status(422, "malformed"), message, {}, places[0][0])
    if isinstance(error, NoPathError):
        allowed = {"allow": ", ".join(sorted(error.methods))} if error.methods else {}
        return Problem(Status(405 if allowed else 404, "not_found"), error.problem, allowed)
    status = status_of(error)
    headers = {"www-authenticate": "Bearer"} if status.code == 401 else {}
    if status.retry:
        headers["retry-after"] = str(max(1, round(getattr(error, "wait", 1.0))))
    place = getattr(error, "parameter", "")
    return Problem(status, status.words or _told(error), headers, place)


def _told(error: BaseException) -> str:
    """Return the message of an error, without the part for the operator."""
    if isinstance(error, MismatchError):
        offenders = [e for e in error.offenders if not e.startswith("this model: ")]
        error = MismatchError(error.problem, offenders=offenders, expected=error.expected)
    return str(error)


def _place(location: Sequence[int | str]) -> str:
    return "".join(f"[{e}]" if isinstance(e, int) else f".{e}" for e in location).lstrip(".")


_LIKE_OPENAI = ("/v1/", "/classify", "/score", "/pooling", "/v2/rerank")  # also for vLLM
_HUGGING_FACE_WORDS = {429: "Overloaded", 503: "Unhealthy"}  # of text-embeddings-inference


class ErrorFacts(BaseModel):
    """What an error in the form of OpenAI says."""

    message: str = Field(description="what is wrong, for people")
    type: str = Field(description="invalid_request_error or server_error")
    param: str | None = Field(None, description="the field that it is about")
    code: str = Field(description="a word for programs")


class OpenAIError(BaseModel):
    """An error of a path of OpenAI, or of vLLM."""

    error: ErrorFacts


class PlainError(BaseModel):
    """An error of any other path."""

    error: str = Field(description="what is wrong, for people")
    error_type: str = Field(description="a word of text-embeddings-inference's clients")
    code: str = Field(description="a word for programs")


def error_model(path: str) -> type[BaseModel]:
    """Return the model of a path's errors."""
    return OpenAIError if path.startswith(_LIKE_OPENAI) else PlainError


def body_of(problem: Problem, path: str) -> dict[str, Any]:
    """Return an error in the format of a path's API."""
    status = problem.status
    if path.startswith(_LIKE_OPENAI):
        kind = "server_error" if status.code >= 500 else "invalid_request_error"
        error = {"message": problem.message, "type": kind, "param": problem.place or None}
        return {"error": {**error, "code": status.name}}
    word = _HUGGING_FACE_WORDS.get(status.code, "Validation" if status.code < 500 else "Backend")
    if path.startswith("/models/"):
        word = {"Backend": "generation"}.get(word, word.lower())
    return {"error": problem.message, "error_type": word, "code": status.name}

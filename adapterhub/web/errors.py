"""Errors of our servers, and the one table of their answers.

`STATUSES` maps each class of errors to a status and a code. `problem_of` returns an error in the
form sent to clients. `body_of` gives it the form of a path's API: OpenAI's, or the one of clients
of Hugging Face and KServe. `refusal_of` and `hub_body` give it the form of the Hub.

Client errors are returned in full. Errors of an adapter or a server may name folders of this
machine: the client receives one sentence, and the rest is logged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from adapterhub.errors import (
    AdapterhubError,
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
    counted,
    nearest,
    one_line,
)

RETRY_SECONDS = 5
_SHOWN = 100  # characters of a name quoted in an error


# The frame of both servers


class LimitError(ServingError):
    """A request exceeds the server's limits on size."""


class LargeBodyError(LimitError):
    """A request body is too large.

    Attributes:
        most: the maximum number of bytes.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        super().__init__("the body is too large", expected=f"at most {most:,} bytes")


class SlowError(ServingError):
    """The body of a request did not arrive in time."""


# The serving engine


class OverloadedError(ServingError):
    """The queue is full.

    Attributes:
        wait: the seconds until the queue is computed, at the rate measured so far.
    """

    def __init__(self, tokens: int, limit: int, wait: float) -> None:
        self.wait = wait
        super().__init__(
            f"the queue is full: {counted(tokens, 'token')} are waiting",
            expected=f"at most {limit:,}",
            hint=f"the same request again in {max(wait, 0.1):.1f} s, or a larger queue_tokens",
        )


class DeadlineError(ServingError):
    """The deadline of a request has passed before it was computed completely."""

    def __init__(self, late: float, action: str = "computed") -> None:
        super().__init__(
            f"the deadline passed {late:.3f} s before the request was {action}",
            expected="a deadline that is longer than the queue",
            hint="a longer deadline, or fewer requests at once",
        )


class StoppedError(ServingError):
    """The engine has stopped computing: it was closed, or its thread died."""


class ComputationError(ServingError):
    """The adapter has computed numbers that are not finite."""


class TooLargeError(ServingError):
    """The memory of the device is too small for one request alone."""


class TooLongError(DataError):
    """An input exceeds the adapter's longest input, and must not be cut."""

    def __init__(self, lost: int, limit: int) -> None:
        super().__init__(
            f"the input is too long: {counted(lost, 'token')} would be cut",
            expected=f"at most {limit:,} tokens",
            hint='a shorter input, or "truncate": true',
        )


# Requests to adapters


class RequestError(ConfigError):
    """A request has an invalid or unsupported value.

    Attributes:
        parameter: the field of the body.
    """

    def __init__(self, problem: str, *, parameter: str, expected: str = "", hint: str = "") -> None:
        self.parameter = parameter
        super().__init__(problem, expected=expected, hint=hint)


class UnknownAdapterError(ServingError):
    """The adapter does not exist or is forbidden to this client; the message is the same."""

    def __init__(self, model: str, known: Iterable[str]) -> None:
        cut = one_line(model, _SHOWN)
        near = nearest(cut, known)
        super().__init__(
            f"no adapter {cut!r} is served",
            hint=" or ".join(near) if near else "GET /v1/models, which lists the served adapters",
        )


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
        status: the HTTP status.
        headers: the methods that the path accepts.
    """

    def __init__(self, methods: Set[str]) -> None:
        self.status = 405 if methods else 404
        accepted = {*methods, *(["HEAD"] if "GET" in methods else [])}
        self.headers = {"allow": ", ".join(sorted(accepted))} if accepted else {}
        super().__init__("Method Not Allowed" if methods else "Not Found")


class NoTokenError(ServingError):
    """A request lacks a valid token."""

    headers: Mapping[str, str] = {"www-authenticate": "Bearer"}


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


# Requests to a hub


class HubRefusal(ServingError):
    """A request that a hub refuses.

    Attributes:
        status: the HTTP status; the table's, unless one is given.
        headers: additional headers of the response.
        summary: the problem without the advice for clients, which pages omit.
    """

    def __init__(
        self,
        problem: str,
        *,
        status: int = 0,
        headers: Mapping[str, str] | None = None,
        advice: str = "",
    ) -> None:
        super().__init__(f"{problem}. {advice}" if advice else problem)
        self.summary = problem
        self.status = status or status_of(self).code
        self.headers = dict(headers or {})

    def with_headers(self, headers: Mapping[str, str]) -> HubRefusal:
        """Return the error with additional headers."""
        self.headers |= headers
        return self


class BusyError(HubRefusal):
    """The database has been locked for too long."""

    def __init__(self) -> None:
        super().__init__("the hub is busy; try again in a few seconds")


class FullDiskError(HubRefusal):
    """The disk is full."""

    def __init__(self) -> None:
        super().__init__("the disk of the hub is full: nothing was written; ask its administrator")


class UnreachedBucketError(HubRefusal):
    """The bucket with the files does not respond, or responds incorrectly."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the bucket of the hub cannot be used: {problem}")


class TooManyBytesError(HubRefusal):
    """A request, a file or a namespace exceeds its limit in bytes."""


class DeniedError(HubRefusal):
    """The token does not permit the request."""


class UnknownTokenError(HubRefusal):
    """The token is unknown to this hub or no longer valid."""

    def __init__(self) -> None:
        super().__init__("this is not a token of this hub")


class MissingRepositoryError(HubRefusal):
    """The repository does not exist or is not visible: both get the same response."""


class MissingRevisionError(HubRefusal):
    """No branch, tag or commit has this name."""

    def __init__(self, revision: str, problem: str = "") -> None:
        shown = repr(one_line(revision, _SHOWN))
        super().__init__(f"{shown} {problem}" if problem else f"no such revision: {shown}")


class MissingEntryError(HubRefusal):
    """The revision has no such file."""


class UpstreamError(HubRefusal):
    """The requested item is not stored here, and the upstream does not provide it now."""


class LyingUpstreamError(HubRefusal):
    """The upstream sends something other than it lists, or data that cannot be read."""


class GatedUpstreamError(DeniedError):
    """The upstream restricts access to the repository."""


class TakenError(HubRefusal):
    """The name is already taken."""


class StaleParentError(HubRefusal):
    """Another writer committed first."""


# The table


@dataclass(frozen=True)
class Status:
    """Response for a class of errors.

    Attributes:
        code: the HTTP status code.
        name: a machine-readable name; the Hub's clients select an exception by theirs.
        words: the message that replaces the error's; "": the error's own message.
        retry: the seconds after which the same request may succeed; 0: it will not.
    """

    code: int
    name: str = ""
    words: str = ""
    retry: int = 0


STATUSES: dict[type[BaseException], Status] = {
    ConfigError: Status(400, "invalid_request"),
    DataError: Status(400, "invalid_input"),
    WrongShapeError: Status(400, "wrong_shape"),
    NoTokenError: Status(401, "no_valid_token"),
    RefusedError: Status(403, "not_allowed"),
    UnknownAdapterError: Status(404, "adapter_not_found"),
    NotPublishedError: Status(404, "adapter_not_found"),
    NoPathError: Status(404, "not_found"),
    SlowError: Status(408, "too_slow"),
    MismatchError: Status(409, "backbone_mismatch"),
    YankedError: Status(410, "adapter_yanked"),
    LimitError: Status(413, "too_large"),
    OverloadedError: Status(429, "overloaded", retry=1),
    RateError: Status(429, "too_many_requests", retry=1),
    HeadError: Status(431, "head_too_large"),
    ComputationError: Status(500, "not_finite"),
    FileError: Status(502, "adapter_not_valid", "the files of the adapter are not valid"),
    SignatureError: Status(502, "adapter_not_signed", "the adapter has no valid signature"),
    UnservableError: Status(502, "adapter_not_served", "the adapter cannot be served as it is"),
    BackboneError: Status(502, "backbone_not_loaded", "the adapter's backbone cannot be loaded"),
    RegistryError: Status(503, "registry_unreachable", "the registry cannot be read", retry=1),
    NotReadyError: Status(503, "not_ready", retry=1),
    StoppedError: Status(503, "not_ready", "the server does not compute now", retry=1),
    DeadlineError: Status(504, "deadline_passed", retry=1),
    TooLargeError: Status(507, "out_of_memory"),
    HubRefusal: Status(400),
    UnknownTokenError: Status(401),
    DeniedError: Status(403),
    GatedUpstreamError: Status(403, "GatedRepo"),
    MissingRepositoryError: Status(404, "RepoNotFound"),
    MissingRevisionError: Status(404, "RevisionNotFound"),
    MissingEntryError: Status(404, "EntryNotFound"),
    TakenError: Status(409),
    StaleParentError: Status(412),
    TooManyBytesError: Status(413),
    LyingUpstreamError: Status(502),
    BusyError: Status(503, retry=RETRY_SECONDS),
    UnreachedBucketError: Status(503, retry=RETRY_SECONDS),
    UpstreamError: Status(503, retry=RETRY_SECONDS),
    FullDiskError: Status(507),
}
"""Status of each class of errors; the first class in an error's MRO that is listed applies."""

_UNEXPECTED = Status(500, "internal_error", "an error of the server, which its log has")


def status_of(error: BaseException) -> Status:
    """Return the status of an error."""
    known = (STATUSES[each] for each in type(error).__mro__ if each in STATUSES)
    return next(known, _UNEXPECTED)


@dataclass(frozen=True)
class Problem:
    """Error as sent to a client: status, message, headers, and the field that it is about."""

    status: Status
    message: str
    headers: dict[str, str]
    place: str = ""


def problem_of(error: BaseException) -> Problem:
    """Return an error in the form sent to a client."""
    status, headers = status_of(error), dict(getattr(error, "headers", {}))
    if isinstance(error, NoPathError | HubRefusal):
        status = replace(status, code=error.status)
    if status.retry:
        headers["retry-after"] = str(max(1, round(getattr(error, "wait", status.retry))))
    message = status.words or _client_message(error)
    return Problem(status, message, headers, getattr(error, "parameter", ""))


def malformed(errors: Sequence[Mapping[str, Any]]) -> Problem:
    """Return the errors of a body that its model lists, in the form sent to a client."""
    places = [(_place(each["loc"]), each["msg"]) for each in errors[:10]]
    message = "; ".join(f"{place}: {words}".lstrip(": ") for place, words in places)
    return Problem(Status(422, "malformed"), message, {}, places[0][0])


def _client_message(error: BaseException) -> str:
    """Return the message of an error, without the part for the operator."""
    if isinstance(error, HubRefusal):
        return one_line(error.problem, 2000)
    if isinstance(error, MismatchError):
        offenders = [e for e in error.offenders if not e.startswith("this model: ")]
        error = MismatchError(error.problem, offenders=offenders, expected=error.expected)
    return str(error)


def _place(location: Sequence[int | str]) -> str:
    return "".join(f"[{e}]" if isinstance(e, int) else f".{e}" for e in location).lstrip(".")


# The forms

LIKE_OPENAI = ("/v1/", "/classify", "/score", "/pooling", "/v2/rerank")
"""The start of paths whose errors have the form of OpenAI, also for vLLM."""
_HUGGING_FACE_WORDS = {429: "Overloaded", 503: "Unhealthy"}  # of text-embeddings-inference


def body_of(problem: Problem, path: str) -> dict[str, Any]:
    """Return an error in the format of a path's API."""
    status = problem.status
    if path.startswith(LIKE_OPENAI):
        kind = "server_error" if status.code >= 500 else "invalid_request_error"
        error = {"message": problem.message, "type": kind, "param": problem.place or None}
        return {"error": {**error, "code": status.name}}
    word = _HUGGING_FACE_WORDS.get(status.code, "Validation" if status.code < 500 else "Backend")
    if path.startswith("/models/"):
        word = {"Backend": "generation"}.get(word, word.lower())
    return {"error": problem.message, "error_type": word, "code": status.name}


def refusal_of(error: Exception) -> HubRefusal:
    """Return the refusal that a hub reports an error as."""
    if isinstance(error, HubRefusal):
        return error
    if isinstance(error, LargeBodyError):
        return TooManyBytesError(f"the body has more than {error.most:,} bytes")
    if isinstance(error, SlowError):
        problem, code = "the body of the request did not come in time", status_of(error).code
        return HubRefusal(problem, status=code, headers={"connection": "close"})
    if isinstance(error, AdapterhubError):
        return HubRefusal("; ".join((error.problem, *error.offenders)))
    return HubRefusal("internal error of the hub; see its log", status=500)


def hub_body(error: HubRefusal) -> tuple[dict[str, str], int, dict[str, str]]:
    """Return a refusal as a body, a status and headers, which the Hub's clients read."""
    problem = problem_of(error)
    message = problem.message
    if isinstance(error, UnknownTokenError):
        # The Hub's clients use this text to tell a wrong token from a missing repository.
        message = "Invalid credentials in Authorization header"
    shown = message.encode("ascii", "replace").decode()
    headers = {"x-error-message": shown, **problem.headers}
    if problem.status.name:
        headers["x-error-code"] = problem.status.name
    return {"error": problem.message}, error.status, headers

"""Which status and which words each error has, in one table, and how each family of paths has it.

An error of the client is told in full. One of an adapter or of the server may name folders of this
machine: the client gets one sentence, and the log the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from adapterhub.errors import (
    AdapterhubError,
    BackboneError,
    ConfigError,
    DataError,
    FileError,
    MismatchError,
    RegistryError,
    SignatureError,
)
from adapterhub.serving.refusals import (
    ComputationError,
    DeadlineError,
    OverloadedError,
    StoppedError,
    TooLargeError,
)


class UnknownAdapterError(AdapterhubError):
    """No such adapter, or none that this client may ask for: the words are the same."""


class LimitError(AdapterhubError):
    """A request is larger than the server takes."""


class WrongShapeError(AdapterhubError):
    """A shape has no answers for the task of the adapter."""

    def __init__(self, reference: str, task: str, paths: Sequence[str]) -> None:
        super().__init__(
            f"{reference} was trained for {task}, for which this path has no answer",
            expected=f"{' or '.join(paths)} for {task}",
        )


@dataclass(frozen=True)
class Status:
    """What a client gets for a class of errors.

    Attributes:
        code: the status of HTTP.
        name: a word for programs.
        words: what is said in place of the error; "": the error itself.
        retry: whether the same request may be answered later.
    """

    code: int
    name: str
    words: str = ""
    retry: bool = False


STATUSES: dict[type[BaseException], Status] = {
    DataError: Status(400, "invalid_input"),
    WrongShapeError: Status(400, "wrong_shape"),
    UnknownAdapterError: Status(404, "adapter_not_found"),
    MismatchError: Status(409, "backbone_mismatch"),
    LimitError: Status(413, "too_large"),
    OverloadedError: Status(429, "overloaded", retry=True),
    ComputationError: Status(500, "not_finite"),
    FileError: Status(502, "adapter_not_verified", "the files of the adapter are not valid"),
    SignatureError: Status(502, "adapter_not_verified", "the adapter's signature is not valid"),
    BackboneError: Status(502, "backbone_not_loaded", "its backbone cannot be loaded"),
    ConfigError: Status(502, "adapter_not_loaded", "the adapter cannot be served as it is"),
    RegistryError: Status(503, "registry_unreachable", "the registry cannot be read", retry=True),
    StoppedError: Status(503, "not_ready", "the server does not compute now", retry=True),
    DeadlineError: Status(504, "deadline_passed"),
    TooLargeError: Status(507, "out_of_memory"),
}
"""The status of each class of errors; the first class of an error's ancestors that is here."""

_UNEXPECTED = Status(500, "internal_error", "an error of the server, which its log has")


def status_of(error: BaseException) -> Status:
    """Return what a client gets for an error."""
    known = (STATUSES[each] for each in type(error).__mro__ if each in STATUSES)
    return next(known, _UNEXPECTED)


@dataclass(frozen=True)
class Problem:
    """An error as a client gets it: its status, words, and the headers beside it."""

    status: Status
    message: str
    headers: dict[str, str]
    place: str = ""


def problem_of(error: BaseException) -> Problem:
    """Return what a client gets for an error."""
    if isinstance(error, ValidationError):
        places = [(_place(each["loc"]), each["msg"]) for each in error.errors()[:10]]
        message = "; ".join(f"{place}: {words}" for place, words in places)
        return Problem(Status(422, "malformed"), message, {}, places[0][0])
    status = status_of(error)
    wait = getattr(error, "wait", 1.0)
    headers = {"retry-after": str(max(1, round(wait)))} if status.retry else {}
    return Problem(status, status.words or str(error), headers)


def _place(location: Sequence[int | str]) -> str:
    return "".join(f"[{e}]" if isinstance(e, int) else f".{e}" for e in location).lstrip(".")


def body_of(problem: Problem, path: str) -> dict[str, Any]:
    """Return an error in the form that clients of a path read."""
    status = problem.status
    if path.startswith("/v1/"):
        kind = "server_error" if status.code >= 500 else "invalid_request_error"
        place = problem.place or None
        return {
            "error": {
                "message": problem.message,
                "type": kind,
                "param": place,
                "code": status.name,
            }
        }
    return {"error": problem.message, "error_type": status.name}

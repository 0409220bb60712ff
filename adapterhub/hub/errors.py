"""Refusals of a hub in the terms of the Hub's clients: a status, a code and a sentence."""

from __future__ import annotations

from collections.abc import Mapping

from adapterhub.errors import AdapterhubError, ServingError, one_line
from adapterhub.web.frame import LargeBodyError, SlowError

RETRY_SECONDS = 5


class HubRefusal(ServingError):
    """A request that is refused.

    Attributes:
        status: the HTTP status.
        code: a code of the Hub, which selects the client's exception; "" for none.
        headers: additional headers of the response.
        summary: the problem without the advice for clients, which pages omit.
    """

    status = 400
    code = ""

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
        self.status = status or self.status
        self.headers = dict(headers or {})

    def with_headers(self, headers: Mapping[str, str]) -> HubRefusal:
        """Return the error with additional headers."""
        self.headers |= headers
        return self


class BusyError(HubRefusal):
    """The database has been locked for too long."""

    status = 503

    def __init__(self) -> None:
        super().__init__(
            "the hub is busy; try again in a few seconds",
            headers={"retry-after": str(RETRY_SECONDS)},
        )


class FullDiskError(HubRefusal):
    """The disk is full."""

    status = 507

    def __init__(self) -> None:
        super().__init__("the disk of the hub is full: nothing was written; ask its administrator")


class UnreachedBucketError(HubRefusal):
    """The bucket with the files does not respond, or responds incorrectly."""

    status = 503

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"the bucket of the hub cannot be used: {problem}",
            headers={"retry-after": str(RETRY_SECONDS)},
        )


class TooManyBytesError(HubRefusal):
    """A request, a file or a namespace exceeds its limit in bytes."""

    status = 413


class SlowBodyError(HubRefusal):
    """The body of a request arrives too slowly."""

    status = 408

    def __init__(self) -> None:
        super().__init__(
            "the body of the request did not come in time", headers={"connection": "close"}
        )


class DeniedError(HubRefusal):
    """The token does not permit the request."""

    status = 403


class UnknownTokenError(HubRefusal):
    """The token is unknown to this hub or no longer valid."""

    status = 401

    def __init__(self) -> None:
        super().__init__("this is not a token of this hub")


class MissingRepositoryError(HubRefusal):
    """The repository does not exist or is not visible: both get the same response."""

    status = 404
    code = "RepoNotFound"


class MissingRevisionError(HubRefusal):
    """No branch, tag or commit has this name."""

    status = 404
    code = "RevisionNotFound"

    def __init__(self, revision: str, problem: str = "") -> None:
        shown = repr(one_line(revision, 100))
        super().__init__(f"{shown} {problem}" if problem else f"there is no revision {shown}")


class MissingEntryError(HubRefusal):
    """The revision has no such file."""

    status = 404
    code = "EntryNotFound"


class UpstreamError(HubRefusal):
    """The requested item is not stored here, and the upstream does not provide it now."""

    status = 503

    def __init__(self, problem: str) -> None:
        super().__init__(problem, headers={"retry-after": str(RETRY_SECONDS)})


class LyingUpstreamError(HubRefusal):
    """The upstream sends something other than it lists, or data that cannot be read."""

    status = 502


class GatedUpstreamError(DeniedError):
    """The upstream restricts access to the repository."""

    code = "GatedRepo"


class TakenError(HubRefusal):
    """The name is already taken."""

    status = 409


class StaleParentError(HubRefusal):
    """Another writer committed first."""

    status = 412


def refusal_of(error: Exception) -> HubRefusal:
    """Return the refusal that an error is reported as."""
    if isinstance(error, HubRefusal):
        return error
    if isinstance(error, LargeBodyError):
        return TooManyBytesError(f"the body has more than {error.most:,} bytes")
    if isinstance(error, SlowError):
        return SlowBodyError()
    if isinstance(error, AdapterhubError):
        return HubRefusal("; ".join((error.problem, *error.offenders)))
    return HubRefusal("the hub has made a mistake; its log says where", status=500)

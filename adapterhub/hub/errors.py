"""What a hub does not do, as the Hub's clients understand it: a status, a code and a sentence."""

from __future__ import annotations

from collections.abc import Mapping

from adapterhub.errors import AdapterhubError, ServingError, one_line
from adapterhub.web.frame import LargeBodyError, SlowError

RETRY_SECONDS = 5


class HubRefusal(ServingError):
    """A request that is not answered as it was asked.

    Attributes:
        status: of HTTP.
        code: one of the Hub's, by which its clients choose their error; "" for none.
        headers: more headers of the answer.
        summary: the problem without the advice for clients, which pages leave out.
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
        """Return it with more headers."""
        self.headers |= headers
        return self


class BusyError(HubRefusal):
    """The database is locked for too long."""

    status = 503

    def __init__(self) -> None:
        super().__init__(
            "the hub is busy; try again in a few seconds",
            headers={"retry-after": str(RETRY_SECONDS)},
        )


class FullDiskError(HubRefusal):
    """There is no room on the disk."""

    status = 507

    def __init__(self) -> None:
        super().__init__("the disk of the hub is full: nothing was written; ask its administrator")


class UnreachedBucketError(HubRefusal):
    """The bucket with the files does not answer, or not as it should."""

    status = 503

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"the bucket of the hub cannot be used: {problem}",
            headers={"retry-after": str(RETRY_SECONDS)},
        )


class TooManyBytesError(HubRefusal):
    """More bytes than a request, a file or a namespace may have."""

    status = 413


class SlowBodyError(HubRefusal):
    """The body does not come in time."""

    status = 408

    def __init__(self) -> None:
        super().__init__(
            "the body of the request did not come in time", headers={"connection": "close"}
        )


class DeniedError(HubRefusal):
    """The token does not allow it."""

    status = 403


class UnknownTokenError(HubRefusal):
    """The token is not one of this hub, or not valid any more."""

    status = 401

    def __init__(self) -> None:
        super().__init__("this is not a token of this hub")


class MissingRepositoryError(HubRefusal):
    """There is none, or it may not be seen: the answers are equal."""

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
    """What is asked is not kept here, and the upstream does not give it now."""

    status = 503

    def __init__(self, problem: str) -> None:
        super().__init__(problem, headers={"retry-after": str(RETRY_SECONDS)})


class LyingUpstreamError(HubRefusal):
    """The upstream sends something else than it lists, or nothing that can be read."""

    status = 502


class GatedUpstreamError(DeniedError):
    """The owner of what is upstream says who may have it."""

    code = "GatedRepo"


class TakenError(HubRefusal):
    """Something has this name already."""

    status = 409


class StaleParentError(HubRefusal):
    """Another writer was first."""

    status = 412


def refusal_of(error: Exception) -> HubRefusal:
    """Return how an error is answered."""
    if isinstance(error, HubRefusal):
        return error
    if isinstance(error, LargeBodyError):
        return TooManyBytesError(f"the body has more than {error.most:,} bytes")
    if isinstance(error, SlowError):
        return SlowBodyError()
    if isinstance(error, AdapterhubError):
        return HubRefusal("; ".join((error.problem, *error.offenders)))
    return HubRefusal("the hub has made a mistake; its log says where", status=500)

"""Read from a hub over HTTP, with limits set before the first byte.

huggingface_hub is not used to read adapters: it joins response headers to paths, follows redirects
with the token, and limits neither sizes nor times. Here, nothing sent by a server becomes a path,
and every response is limited:

- its size, by the caller's limit or by a size verified before;
- its time, since a request with its redirects has `GRACE_SECONDS` and then must keep `MIN_RATE`,
  headers included; a request that took too long is not retried;
- its redirects, after `MAX_REDIRECTS`, and where `HubNetwork` refuses them. The token goes to the
  hub's origin only, and not even there after a redirect through another one.

Errors do not contain text from the server, which might include the token or mislead.
"""

from __future__ import annotations

import hashlib
import re
import ssl
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from urllib.parse import urlencode

import httpx2

from adapterhub._version import __version__
from adapterhub.backbones.hub_network import (
    MIN_RATE,
    ForbiddenAddressError,
    HubNetwork,
    OversizedError,
    UnusableProxyError,
    Watchdog,
    proxy_advice,
    url_origin,
    usable_proxies,
)
from adapterhub.errors import ConfigError, FileError, NotPublishedError, RegistryError
from adapterhub.registry.store import Stored

GRACE_SECONDS = 30.0  # for the connection and the headers, and for a pause of the network
CONNECT_SECONDS = 10.0
READ_SECONDS = 20.0  # between two packets
MAX_REDIRECTS = 5  # the Hub needs one or two: a renamed repository, its object store
_WAITS = (0.5, 1.0, 2.0)  # seconds before the next attempts, after a cut or an overload
_PROGRESS_BYTES = 1 << 20  # attempts that received this much do not count
_BUSY = (429, 500, 502, 503, 504)
Params = tuple[tuple[str, str], ...]
_REDIRECTS = (301, 302, 303, 307, 308)
_ABSENT = (403, 404, 410)  # 403: of an S3 bucket's website, if its files may not be listed
_TAG = r'(W/)?"[\x21\x23-\x7e]{1,200}"'


class UnreachableError(RegistryError):
    """The hub timed out, or is unreachable, or this machine is offline; a cache may be used."""


class GatedError(RegistryError):
    """The files need the owner's approval and a token."""


class MissingFileError(RegistryError):
    """The file is missing from an existing revision, or not served by a plain web server."""


@dataclass(frozen=True)
class Expected:
    """Properties of a file that are known before download; None is unknown.

    `limit` is the largest size. `git_sha1` is git's own hash of the contents with their length.
    """

    limit: int
    size: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None


class HubClient:
    """Read-only HTTP client of one hub.

    `base` is the hub's URL and `token` its token. With `plain`, `base` is any web server, and each
    file that it does not serve raises a `MissingFileError`. `patience` limits the seconds until a
    response begins, and disables retries.

    Raises:
        ConfigError: `base` is not an http or https URL.
    """

    def __init__(
        self,
        base: str,
        token: str | None = None,
        *,
        plain: bool = False,
        patience: float | None = None,
    ) -> None:
        self.base = base.rstrip("/")
        self.token = token
        self._is_plain, self._patience = plain, patience
        try:
            self._network = HubNetwork(self.base)
        except ForbiddenAddressError as error:
            raise ConfigError(
                f"the address of the hub is {error}: {self.base[:80]!r}",
                expected="https://host",
                hint="check HF_ENDPOINT",
            ) from None
        self._client: httpx2.Client | None = None
        self._is_slow = False  # each further request of a command would take as long

    def read(self, path: str, limit: int, subject: str, params: Params = ()) -> bytes:
        """Return the body of a response, of at most `limit` bytes; `path` is quoted.

        Raises:
            UnreachableError: no connection, or offline.
            MissingFileError: no such file in an existing revision.
            RegistryError: refused, or the response is too large, too slow or malformed.
        """
        query = f"?{urlencode(params)}" if params else ""
        return self.reread(f"{path}{query}", limit, subject).data

    def reread(self, path: str, limit: int, subject: str, known: str = "") -> Stored:
        """Return the body of a response and its tag; no body if the tag is still `known`.

        Raises:
            UnreachableError: no connection, or offline.
            MissingFileError: no such file in an existing revision, or on a plain server.
            RegistryError: refused, or the response is too large, too slow or malformed.
        """
        data, tag = bytearray(), ""

        def receive(answer: HubAnswer) -> None:
            nonlocal tag
            data.clear()
            tag = known
            if answer.status != 304:
                tag = answer.tag
                for chunk in answer.chunks(limit):
                    data.extend(chunk)

        self._attempt(f"{self.base}{path}", subject, receive, known=known)
        if self.token and self.token.encode() in data:  # parts of it may be printed
            raise RegistryError(f"{subject}: the server's answer repeats your token")
        return Stored(bytes(data), tag)

    def download(
        self,
        path: str,
        target: Path,
        expected: Expected,
        subject: str,
        progress: Callable[[int], object] = lambda count: None,
    ) -> Expected:
        """Download a file to a new path and verify it; an interrupted download is resumed.

        Returns its size and both hashes. `progress` is called with the number of bytes received
        since the last call, and at the start of each attempt; its errors stop the download.

        Raises:
            UnreachableError: no connection, or offline.
            MissingFileError: no such file in an existing revision.
            RegistryError: refused, or the response is too large, too slow or malformed.
            FileError: the file is not the expected one.
        """
        limit = expected.limit if expected.size is None else expected.size
        with open(target, "xb") as handle:

            def receive(answer: HubAnswer) -> None:
                if answer.start == 0:  # also if the server ignored the range
                    progress(-handle.tell())
                    handle.seek(0)
                    handle.truncate()
                for chunk in answer.chunks(limit - answer.start):
                    handle.write(chunk)
                    progress(len(chunk))

            def position() -> int:
                progress(0)  # which may give up
                return handle.tell()

            self._attempt(f"{self.base}{path}", subject, receive, position)
        return _verified(target, expected, subject)

    def _attempt(
        self,
        url: str,
        subject: str,
        receive: Callable[[HubAnswer], None],
        position: Callable[[], int] = lambda: 0,
        known: str = "",
    ) -> None:
        """Request a URL, with retries after interruptions and overloads."""
        pauses = _WAITS if self._patience is None else ()
        waits, began = iter(pauses), time.monotonic()
        while True:
            start = position()
            try:
                with self._answer(url, start, subject, began, known) as answer:
                    receive(answer)
                return
            except _InterruptedError as error:
                if position() >= start + _PROGRESS_BYTES:
                    waits, began = iter(pauses), time.monotonic()
                pause = next(waits, None)
                if pause is None:
                    raise UnreachableError(f"{subject}: {error}", hint="try again later") from None
                time.sleep(pause)

    @contextmanager
    def _answer(
        self, url: str, start: int, subject: str, began: float, known: str
    ) -> Iterator[HubAnswer]:
        """Send a request and follow its redirects within the time limit of one connection."""
        token = self.token
        for _ in range(MAX_REDIRECTS + 1):
            try:
                if url_origin(url) != self._network.origin:
                    token = None  # permanently: the other server would decide on the way back
                with self._send(url, token, start, subject, began, known) as answer:
                    if answer.status not in _REDIRECTS:
                        if self._is_plain and answer.status in _ABSENT:
                            raise MissingFileError(
                                f"{subject}: the server answered {answer.status}"
                            )
                        answer.check()
                        yield answer
                        return
                    url = self._network.redirected(url, answer.headers.get("location", ""))
            except ForbiddenAddressError as error:
                raise RegistryError(f"{subject}: the server answered with {error}") from None
        raise RegistryError(
            f"{subject}: the server answered with more than {MAX_REDIRECTS} redirects"
        )

    @contextmanager
    def _send(
        self, url: str, token: str | None, start: int, subject: str, began: float, known: str
    ) -> Iterator[HubAnswer]:
        if not self._is_plain:  # the setting is about the Hub, not about a team's own web server
            _refuse_offline(subject)
        if self._is_slow:
            raise _too_slow(subject)
        headers = {
            "accept-encoding": "identity",  # a few compressed bytes can be gigabytes
            "user-agent": f"adapterhub/{__version__}",
            **({"authorization": f"Bearer {token}"} if token else {}),
            **({"range": f"bytes={start}-"} if start else {}),
            **({"if-none-match": known} if known else {}),
        }
        grace = GRACE_SECONDS if self._patience is None else self._patience
        watchdog = Watchdog(self._network.trace(url))
        watchdog.begin(grace, began)
        try:
            with (
                closing(watchdog),
                self._http().stream(
                    "GET", url, headers=headers, extensions={"trace": watchdog.trace}
                ) as response,
            ):
                yield HubAnswer(response, start, watchdog, subject, bool(token), self.base, known)
        except UnusableProxyError:
            raise _unreachable(subject, "its proxy cannot be used", url) from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            self._is_slow = watchdog.expired
            raise _error(error, watchdog, subject, url) from None

    def _http(self) -> httpx2.Client:
        if self._client is None:
            most = float("inf") if self._patience is None else self._patience
            times = httpx2.Timeout(min(READ_SECONDS, most), connect=min(CONNECT_SECONDS, most))
            with usable_proxies():
                self._client = httpx2.Client(
                    verify=_tls(),
                    follow_redirects=False,
                    timeout=times,
                    # A fresh connection for each request: the watchdog can end it.
                    limits=httpx2.Limits(max_keepalive_connections=0),
                    cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
                )
            weakref.finalize(self, self._client.close)
        return self._client


class _InterruptedError(Exception):
    """An interrupted response, or an overload: worth a retry."""


class HubAnswer:
    """An HTTP response whose body has not been received yet."""

    def __init__(
        self,
        response: httpx2.Response,
        start: int,
        watchdog: Watchdog,
        subject: str,
        authorized: bool,
        base: str,
        known: str = "",
    ) -> None:
        self.status = response.status_code
        self.headers = response.headers
        is_part = self.status == 206 and self._text("content-range", rf"bytes {start}-\d+/\d+")
        self.start = start if is_part else 0
        self._response, self._watchdog = response, watchdog
        self._subject, self._authorized, self._base = subject, authorized, base
        self._known = known

    @property
    def tag(self) -> str:
        """The tag that changes with the body; "" if it is missing or malformed."""
        return self._text("etag", _TAG) or ""

    def check(self) -> None:
        """Raise the error of a response without the requested body."""
        if self.status in _BUSY:
            raise _InterruptedError(f"the server answered {self.status}")
        if self.status == 304 and self._known:
            return
        if self.status != (206 if self.start else 200):
            code = self._text("x-error-code", "[A-Za-z]{1,40}") or ""
            raise _refusal(self.status, code, self._subject, self._base, self._authorized)
        if self.headers.get("content-encoding", "identity") != "identity":
            raise RegistryError(f"{self._subject}: the server sent a compressed answer")

    def chunks(self, limit: int) -> Iterator[bytes]:
        """Yield the body, of at most `limit` bytes."""
        stated = int(self._text("content-length", r"\d{1,18}") or 0)
        try:
            yield from self._watchdog.counted(self._response.iter_raw(), limit, stated)
        except OversizedError:
            raise RegistryError(
                f"{self._subject}: the server sent more than the {limit} bytes that it may have"
            ) from None

    def _text(self, header: str, pattern: str) -> str | None:
        """Return a header that has exactly the form of a pattern, or None."""
        value = self.headers.get(header, "")
        return value if re.fullmatch(pattern, value) else None


@cache
def _tls() -> ssl.SSLContext:
    return httpx2.create_ssl_context()  # reads all certificates: 20 ms


def _refuse_offline(subject: str) -> None:
    from huggingface_hub import constants  # slow to import

    if constants.HF_HUB_OFFLINE:
        raise _unreachable(subject, "HF_HUB_OFFLINE is set")


def _error(error: Exception, watchdog: Watchdog, subject: str, url: str) -> Exception:
    if watchdog.expired:
        return _too_slow(subject)
    if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError)):
        return _unreachable(subject, type(error).__name__, url)
    if isinstance(error, (httpx2.NetworkError, httpx2.TimeoutException)):
        return _InterruptedError(f"the connection broke off ({type(error).__name__})")
    if isinstance(error, httpx2.RemoteProtocolError):
        return _InterruptedError("the answer is incomplete or is not HTTP")
    return RegistryError(f"{subject}: the server cannot be used ({type(error).__name__})")


def _too_slow(subject: str) -> UnreachableError:
    return UnreachableError(
        f"{subject}: the server is too slow",
        expected=f"{MIN_RATE} bytes per second after {GRACE_SECONDS:.0f} s",
        hint="try again on a faster connection",
    )


def _unreachable(subject: str, reason: str, url: str = "") -> UnreachableError:
    return UnreachableError(
        f"{subject} cannot be reached and is not in the cache: {reason}", hint=network_hint(url)
    )


def network_hint(url: str) -> str:
    """Return a hint for an unreachable URL; "" is one that was not requested."""
    advice = proxy_advice(url) if url else ""
    return advice or "check the network, HF_HUB_OFFLINE and HF_ENDPOINT"


def _refusal(status: int, code: str, subject: str, base: str, authorized: bool) -> RegistryError:
    """Build the error for an unsuccessful status; the code is one of the Hub's."""
    if status == 404 and code == "EntryNotFound":
        return MissingFileError(f"{subject} has no such file")
    if code == "RevisionNotFound":
        return NotPublishedError(
            f"{subject} has no such version", hint=f"adapterhub show {subject}"
        )
    if code == "GatedRepo":
        return GatedError(
            f"{subject} is gated", hint=f"request access on its page, then {login_hint(base)}"
        )
    if code == "RepoNotFound" or status in (401, 404):
        return NotPublishedError(
            f"{subject} does not exist, or you have no access to it", hint=login_hint(base)
        )
    if status == 403:
        reason = "your token lacks the permission" if authorized else "it needs a token"
        return RegistryError(f"{subject}: {reason}", hint=login_hint(base))
    return RegistryError(f"{subject}: the server answered {status}")


def login_hint(base: str) -> str:
    """Return a hint on how to get a token for a hub."""
    from huggingface_hub import constants

    if base == constants.ENDPOINT.rstrip("/"):
        return "hf auth login, or set HF_TOKEN"
    return f"adapterhub login {url_origin(base)}"


def _verified(path: Path, expected: Expected, subject: str) -> Expected:
    size = path.stat().st_size
    sha256, git_sha1 = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size)
    with open(path, "rb") as handle:
        while chunk := handle.read(1 << 20):
            sha256.update(chunk)
            git_sha1.update(chunk)
    digests = Expected(size, size, sha256.hexdigest(), git_sha1.hexdigest())
    problems = [
        f"{name} {actual} instead of {required}"
        for name, actual, required in (
            ("size", size, expected.size),
            ("sha256", digests.sha256, expected.sha256),
            ("git's sha1", digests.git_sha1, expected.git_sha1),
        )
        if required not in (None, actual)
    ]
    if problems:
        raise FileError(
            f"{subject} is not what was published",
            offenders=problems,
            hint="pull it again; the hub may have changed in the meantime",
        )
    return digests

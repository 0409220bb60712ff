"""What all calls share: the engine, which adapters may be asked for, limits, tokens and metrics."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from adapterhub.errors import AdapterhubError, warn_user
from adapterhub.serving.engine import ServingEngine
from adapterhub.serving.http.access import AllowedAdapters, kind_of_pattern
from adapterhub.serving.http.errors import RateError
from adapterhub.serving.http.metrics import ServerMetrics
from adapterhub.web.tokens import AccessToken, TokenFile

STUCK_SECONDS = 120.0  # that the compute thread may take for one batch


@dataclass(frozen=True)
class RequestLimits:
    """The most that one request may have, and how long it may take.

    Attributes:
        body: the bytes of its body.
        inputs: the inputs.
        deadline: the seconds until it is computed, or the first token of a text is.
        generation_time: the seconds that a text may take from there on.
        per_minute: the requests of one token in a minute; 0: any number.
    """

    body: int = 4 << 20
    inputs: int = 1024
    deadline: float = 30.0
    generation_time: float = 300.0
    per_minute: int = 0


@dataclass
class RequestRate:
    """How many requests of each token are answered in a minute.

    Each has `per_minute` at first, and gets one back every 60/`per_minute` seconds.
    """

    per_minute: int
    _left: dict[str, tuple[float, float]] = field(default_factory=dict)

    def take(self, name: str) -> None:
        """Count a request.

        Raises:
            RateError: there were too many.
        """
        if not self.per_minute:
            return
        now, speed = time.monotonic(), self.per_minute / 60
        left, since = self._left.get(name, (float(self.per_minute), now))
        left = min(float(self.per_minute), left + (now - since) * speed)
        if left < 1:
            raise RateError(self.per_minute, (1 - left) / speed)
        self._left[name] = (left - 1, now)


class Service:
    """What all calls share.

    Args:
        engine: what computes.
        allowed: which adapters may be asked for.
        backbone: the name of the backbone without an adapter; "" if it is not served.
        limits: of each request.
        tokens: those that clients need; None: none is needed, from this machine.
        metric_adapters: how many adapters have metrics of their own.
        origins: those of pages in browsers that may ask.

    Attributes:
        endpoints: all paths.
        is_ready: whether all is loaded and warm, and the server is not leaving.
        is_leaving: whether the server leaves: it answers what it has read, and closes connections.
        encoders: the threads in which bodies are read and inputs are encoded.
    """

    def __init__(
        self,
        engine: ServingEngine,
        allowed: AllowedAdapters,
        *,
        backbone: str = "",
        limits: RequestLimits | None = None,
        tokens: TokenFile | None = None,
        metric_adapters: int = 100,
        origins: frozenset[str] = frozenset(),
    ) -> None:
        self.origins = origins
        self.engine, self.allowed, self.backbone = engine, allowed, backbone
        self.limits, self.tokens = limits or RequestLimits(), tokens
        self.metrics = ServerMetrics(engine, metric_adapters)
        self.rate = RequestRate(self.limits.per_minute)
        self.endpoints: tuple[Any, ...] = ()  # `Endpoint`, whose module needs this one
        self.is_ready = True
        self.is_leaving = False
        self.encoders = ThreadPoolExecutor(4, "adapterhub-encode")
        self._refreshing = threading.Lock()

    @property
    def is_alive(self) -> bool:
        """Whether requests are computed: the compute thread lives, and is not stuck."""
        return self.engine.is_alive and self.engine.busy_seconds() < STUCK_SECONDS

    def leave(self) -> None:
        """Be ready no more; what was read is answered, unless the server was still starting."""
        self.is_leaving = self.is_leaving or self.is_ready
        self.is_ready = False

    def refresh(self) -> int:
        """Look for new versions of what is loaded, and for new names; return how many have moved.

        While the registry cannot be read, all stays as it is.
        """
        with self._refreshing:
            if self.tokens is not None:
                self.tokens.note_uses()
            try:
                self.list_published()
            except AdapterhubError as error:
                warn_user(f"the registry is not read: {error.problem}")
            return self.engine.refresh()

    def list_published(self) -> None:
        """Look up the names of the registry that clients may ask for.

        Raises:
            RegistryError: it cannot be read.
        """
        patterns = [p for p in self.allowed.patterns if kind_of_pattern(p) == "local"]
        if patterns:
            published = self.engine.adapters.published().items()
            names = [name for name, own in published if any(each.yanked is None for each in own)]
            matching = (name for name in names if any(fnmatchcase(name, p) for p in patterns))
            self.allowed.listed = tuple(sorted(matching))

    def check_token(self, header: str | None) -> AccessToken | None:
        """Return what the token in a header allows; None if it is not valid."""
        kind, _, token = (header or "").partition(" ")
        if self.tokens is None or kind.lower() != "bearer":
            return None
        return self.tokens.check(token.strip())

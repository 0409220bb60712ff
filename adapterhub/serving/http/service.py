"""What all calls share: the engine, which adapters may be asked for, limits, and how it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from adapterhub.serving.engine import ServingEngine
from adapterhub.serving.http.allowed import AllowedAdapters

if TYPE_CHECKING:
    from adapterhub.serving.http.call import Endpoint

STUCK_SECONDS = 120.0  # that the compute thread may take for one batch


@dataclass(frozen=True)
class RequestLimits:
    """The most that one request may have, and how long it may take.

    Attributes:
        body: the bytes of its body.
        inputs: the inputs.
        deadline: the seconds until it is computed.
        per_minute: the requests of one token in a minute; 0: any number.
    """

    body: int = 4 << 20
    inputs: int = 1024
    deadline: float = 30.0
    per_minute: int = 0


@dataclass
class Service:
    """What all calls share.

    Attributes:
        engine: what computes.
        allowed: which adapters may be asked for.
        backbone: the name of the backbone without an adapter; "" if it is not served.
        limits: of each request.
        endpoints: all paths.
        is_ready: whether all is loaded and warm, and the server is not leaving.
    """

    engine: ServingEngine
    allowed: AllowedAdapters
    backbone: str = ""
    limits: RequestLimits = field(default_factory=RequestLimits)
    endpoints: tuple[Endpoint, ...] = ()
    is_ready: bool = True

    @property
    def is_alive(self) -> bool:
        """Whether requests are computed: the compute thread lives, and is not stuck."""
        return self.engine.is_alive and self.engine.busy_seconds() < STUCK_SECONDS

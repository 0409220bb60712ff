"""What all calls share: the engine, which adapters may be asked for, and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from adapterhub.errors import ConfigError, nearest
from adapterhub.inference.open import AdapterSource
from adapterhub.registry.reference import parse_reference
from adapterhub.serving.engine import ServingEngine
from adapterhub.serving.http.errors import UnknownAdapterError

if TYPE_CHECKING:
    from adapterhub.serving.http.call import Call, Endpoint


@dataclass(frozen=True)
class Limits:
    """The most that one request may have, and how long it may take.

    Attributes:
        body: the bytes of its body.
        inputs: the inputs.
        deadline: the seconds until it is computed.
    """

    body: int = 4 << 20
    inputs: int = 1024
    deadline: float = 30.0


@dataclass(frozen=True)
class AllowedAdapters:
    """Which adapters clients may ask for.

    Attributes:
        named: by the name that clients use; None is the backbone.
        patterns: for names of the registry, such as team-*; a hub only where the pattern names it.
        folders: the names of those that are folders of this machine, which no client sees.
    """

    named: dict[str, AdapterSource | None]
    patterns: tuple[str, ...] = ()
    folders: frozenset[str] = frozenset()

    def shown(self, model: str, reference: str) -> str:
        """Return how an adapter is called in answers: by its version, or by the client's name."""
        return model if model in self.folders or not reference else reference

    def find(self, model: str) -> AdapterSource | None:
        """Return what a client means.

        Raises:
            UnknownAdapterError: there is none, or it is not allowed.
        """
        if model in self.named:
            return self.named[model]
        try:
            reference = parse_reference(model)
        except ConfigError:
            raise self.unknown(model) from None
        if reference.kind != "folder":
            name = str(reference).removesuffix(f"@{reference.version}")
            if name in self.named and (known := self.named[name]) is not None:
                versioned = parse_reference(known.reference).version is not None
                if not versioned and reference.kind == "local":
                    return AdapterSource(model)
            for pattern in self.patterns:
                same_kind = parse_kind(pattern) == reference.kind
                if same_kind and fnmatchcase(name, pattern):
                    return AdapterSource(model)
        raise self.unknown(model)

    def unknown(self, model: str) -> UnknownAdapterError:
        """Return the error for a name that means nothing, whatever the reason."""
        near = nearest(model[:200], self.named)
        return UnknownAdapterError(
            f"no adapter {model[:200]!r} is served",
            hint=" or ".join(near) if near else "GET /v1/models, which lists them",
        )


def parse_kind(pattern: str) -> str:
    """Return the kind of the references that a pattern is for."""
    if pattern.startswith("hf:"):
        return "hub"
    return "server" if "://" in pattern else "local"


@dataclass
class Service:
    """What all calls share.

    Attributes:
        engine: what computes.
        allowed: which adapters may be asked for.
        limits: of each request.
        endpoints: all paths.
    """

    engine: ServingEngine
    allowed: AllowedAdapters
    limits: Limits = field(default_factory=Limits)
    endpoints: tuple[Endpoint, ...] = ()

    def find(self, model: str, call: Call) -> AdapterSource | None:
        """Return the adapter that a client means and may ask for.

        Raises:
            UnknownAdapterError: there is none, or it is not allowed.
        """
        return self.allowed.find(model)

    def endpoints_for(self, task: str) -> Sequence[str]:
        """List the paths that have answers for a task, the one for all tasks at the end."""
        own = [each.path for each in self.endpoints if task in each.tasks]
        return [*own, "/v1/predict"]

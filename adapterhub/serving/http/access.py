"""Which adapters clients may ask for: those that the operator named, or that match a pattern.

A client's word alone opens nothing: no path, and no hub that no pattern names. Whatever the reason,
an adapter that may not be asked for gets the words of one that does not exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain, islice

from adapterhub.errors import ConfigError, ServingError, nearest, one_line
from adapterhub.inference.open import AdapterSource
from adapterhub.registry.reference import Reference, parse_reference

_LONGEST = 512  # characters of a name that is looked up
_SHOWN = 100  # and of one that is repeated in an error
_NEAR = 200  # names that are compared with an unknown one


class UnknownAdapterError(ServingError):
    """No such adapter, or none that this client may ask for: the words are the same."""

    def __init__(self, model: str, known: Iterable[str]) -> None:
        cut = one_line(model, _SHOWN)
        near = nearest(cut, known)
        super().__init__(
            f"no adapter {cut!r} is served",
            hint=" or ".join(near) if near else "GET /v1/models, which lists what is served",
        )


@dataclass
class AllowedAdapters:
    """The adapters that clients may ask for.

    Attributes:
        named: by the name that clients use; None is the backbone without an adapter.
        patterns: of names in the registry, such as team-*; of a hub where they begin like its
            references.
        folders: the names of those that are folders of this machine, which no client sees.
        aliases: names that were given to adapters while the server runs.
        listed: names of the registry that match the patterns, as they were last looked up.
    """

    named: Mapping[str, AdapterSource | None]
    patterns: tuple[str, ...] = ()
    folders: frozenset[str] = frozenset()
    aliases: dict[str, AdapterSource] = field(default_factory=dict)
    listed: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """All names that are known beforehand."""
        return list(dict.fromkeys((*self.named, *self.aliases, *self.listed)))

    def find(self, model: str, patterns: Collection[str] = ("*",)) -> AdapterSource | None:
        """Return what a client means whose token has these patterns.

        Raises:
            UnknownAdapterError: there is none, or it is not allowed.
        """
        if may_ask_for(model, patterns):
            if model in self.aliases:
                return self.aliases[model]
            if model in self.named:
                return self.named[model]
            if self._is_allowed(model):
                return AdapterSource(model)
        raise self.unknown(model, patterns)

    def unknown(self, model: str, patterns: Collection[str]) -> UnknownAdapterError:
        """Return the error for a name, with near ones among those that a token may ask for.

        Of many names, the first ones with its first letter are compared.
        """
        known: Iterable[str] = chain(self.named, self.aliases, self.listed)
        if len(self.named) + len(self.listed) > _NEAR:
            known = (name for name in known if name[:1] == model[:1])
        near = (name for name in known if may_ask_for(name, patterns))
        return UnknownAdapterError(model, islice(near, _NEAR))

    def shown(self, model: str, reference: str) -> str:
        """Return how an adapter is called in answers: by its version, or by the client's name."""
        return model if model in self.folders or not reference else reference

    def _is_allowed(self, model: str) -> bool:
        reference = _parsed(model)
        if reference is None or reference.kind == "folder":
            return False
        name = without_version(reference)
        known = self.named.get(name)
        if name not in self.folders and known is not None and known.reference == name:
            return True  # another version of one that was named without
        return any(
            fnmatchcase(name, pattern) and kind_of_pattern(pattern) == reference.kind
            for pattern in self.patterns
        )


def may_ask_for(model: str, patterns: Collection[str]) -> bool:
    """Return whether a token with these patterns may ask for an adapter, in any version."""
    if "*" in patterns:
        return True
    reference = _parsed(model)
    name = model if reference is None else without_version(reference)
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def without_version(reference: Reference) -> str:
    """Return the text of a reference without its version."""
    return str(reference).removesuffix(f"@{reference.version}")


def kind_of_pattern(pattern: str) -> str:
    """Return of which kind the references are that a pattern is for."""
    if pattern.startswith("hf:"):
        return "hub"
    return "server" if "://" in pattern else "local"


def _parsed(model: str) -> Reference | None:
    try:
        return parse_reference(model) if len(model) <= _LONGEST else None
    except ConfigError:
        return None

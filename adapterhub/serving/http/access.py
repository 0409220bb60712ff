"""Access of clients to adapters: the operator lists names or patterns.

A client cannot open any other path or hub. Whatever the reason, a forbidden adapter is reported in
the same words as an adapter that does not exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain, islice

from adapterhub.errors import ConfigError
from adapterhub.inference.open import AdapterSource
from adapterhub.registry.store import Reference, parse_reference
from adapterhub.web.errors import UnknownAdapterError

_LONGEST = 512  # characters of a name to look up
_NEAR = 200  # names compared with an unknown name


@dataclass
class AllowedAdapters:
    """Adapters that clients may request.

    Attributes:
        named: the adapters by client name; None is the backbone without an adapter.
        patterns: patterns of names in the registry, such as team-*, or in a hub if they start like
            its references.
        folders: the names of adapters in local folders; the paths are hidden from clients.
        aliases: names added for adapters while the server runs.
        listed: names in the registry that match the patterns, as of the last lookup.
    """

    named: Mapping[str, AdapterSource | None]
    patterns: tuple[str, ...] = ()
    folders: frozenset[str] = frozenset()
    aliases: dict[str, AdapterSource] = field(default_factory=dict)
    listed: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """All names that are known in advance."""
        return list(dict.fromkeys((*self.named, *self.aliases, *self.listed)))

    def find(self, model: str, patterns: Collection[str] = ("*",)) -> AdapterSource | None:
        """Return the source of an adapter, for a client whose token has these patterns.

        Raises:
            UnknownAdapterError: the adapter does not exist, or is not allowed.
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
        """Return the error for a name, with similar names among the ones that a token allows.

        If there are many, only the first names with the same first letter are compared.
        """
        names: Iterable[str] = chain(self.named, self.aliases, self.listed)
        if len(self.named) + len(self.listed) > _NEAR:
            names = (name for name in names if name[:1] == model[:1])
        near = (name for name in names if may_ask_for(name, patterns))
        return UnknownAdapterError(model, islice(near, _NEAR))

    def shown(self, model: str, reference: str) -> str:
        """Return the name of an adapter in responses: with its version, or the client's name."""
        return model if model in self.folders or not reference else reference

    def _is_allowed(self, model: str) -> bool:
        reference = _parsed(model)
        if reference is None or reference.kind == "folder":
            return False
        name = without_version(reference)
        source = self.named.get(name)
        if name not in self.folders and source is not None and source.reference == name:
            return True  # a version of an adapter named without one
        return any(
            fnmatchcase(name, pattern) and kind_of_pattern(pattern) == reference.kind
            for pattern in self.patterns
        )


def may_ask_for(model: str, patterns: Collection[str]) -> bool:
    """Return whether a token with these patterns allows an adapter, in any version."""
    if "*" in patterns:
        return True
    reference = _parsed(model)
    name = model if reference is None else without_version(reference)
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def without_version(reference: Reference) -> str:
    """Return a reference without its version."""
    return str(reference).removesuffix(f"@{reference.version}")


def kind_of_pattern(pattern: str) -> str:
    """Return the kind of references that a pattern matches."""
    if pattern.startswith("hf:"):
        return "hub"
    return "server" if "://" in pattern else "local"


def _parsed(model: str) -> Reference | None:
    try:
        return parse_reference(model) if len(model) <= _LONGEST else None
    except ConfigError:
        return None

"""The keys that a user trusts, by namespace, and when an adapter must be signed by one of them.

    trust.json    {"require_signatures": false, "trusted": {"hf:acme/*": ["ed25519:..."]},
                   "version": 1}

The file is in the user's configuration folder, or at `$ADAPTERHUB_TRUST`. What is in a namespace
with trusted keys must be signed by one of them. Of several namespaces that cover an adapter, the
most specific alone decides. If signatures are required in general (in this file, by
`$ADAPTERHUB_REQUIRE_SIGNATURES`, or for one call), everything else must be signed too; folders,
which are in no namespace, by any trusted key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path

from filelock import FileLock

from adapterhub.config.user_folders import user_folder
from adapterhub.errors import ConfigError, FileError
from adapterhub.files import schema
from adapterhub.files.atomic import UnreadableError, explained, read_file, replace_file
from adapterhub.files.keys import PublicKey, key_problems
from adapterhub.registry.namespaces import Namespace, addresses, parse_namespace
from adapterhub.registry.reference import Reference

TRUST_VARIABLE, REQUIRE_VARIABLE = "ADAPTERHUB_TRUST", "ADAPTERHUB_REQUIRE_SIGNATURES"
_MAX_BYTES = 1 << 20  # for _MAX_NAMESPACES with a few keys each
_MAX_NAMESPACES, _MAX_KEYS = 1_000, 16
_SWITCH: Mapping[str, bool] = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("", "0", "false", "no", "off"), False),
}
_required_here: ContextVar[bool] = ContextVar("required_here", default=False)


@dataclass(frozen=True)
class Trust:
    """The contents of the file: public keys by namespace, and the general switch."""

    trusted: Mapping[Namespace, tuple[str, ...]] = field(default_factory=dict)
    require_signatures: bool = False


@dataclass(frozen=True)
class SigningRule:
    """Whether an adapter must be signed, and by which keys.

    `namespace` is the text of the one that decides; None if no key is trusted for the adapter.
    """

    required: bool
    keys: frozenset[str] = frozenset()
    namespace: str | None = None

    @property
    def public_keys(self) -> list[PublicKey]:
        """The keys, to show their ids."""
        return [PublicKey(key) for key in sorted(self.keys)]


def trust_path() -> Path:
    """Return `$ADAPTERHUB_TRUST`, or else `trust.json` in the user's configuration folder."""
    path = os.environ.get(TRUST_VARIABLE)
    return Path(path) if path else user_folder("config") / "trust.json"


def read_trust() -> Trust:
    """Read the trusted keys; none if there is no file.

    Raises:
        FileError: the file cannot be read: an unreadable file never means that nothing is required.
    """
    path = trust_path()
    if not os.path.lexists(path):
        if os.environ.get(TRUST_VARIABLE):
            raise FileError(f"no file {path}, the one that ${TRUST_VARIABLE} names")
        return Trust()
    try:
        data = read_file(path.resolve(), 1, _MAX_BYTES, None)  # one's own links are followed
    except UnreadableError as error:
        raise FileError(f"the trusted keys in {path} cannot be read: {error}") from None
    tree, offenders = schema.parse_object(data, _MAX_BYTES)
    if offenders := offenders or _SCHEMA("", tree):
        raise FileError(
            f"{path} is not a file of trusted keys",
            offenders=schema.shorten(offenders),
            hint="correct it, or delete it and trust the keys again: adapterhub trust",
        )
    trusted = {parse_namespace(text): tuple(keys) for text, keys in tree["trusted"].items()}
    return Trust(trusted, tree["require_signatures"])


def trust_key(namespace: Namespace, key: PublicKey) -> None:
    """Trust a key for a namespace.

    Raises:
        ConfigError: the namespace has too many keys, or there are too many namespaces.
        FileError: the file cannot be read.
        OutputError: the file cannot be written.
    """
    with _changing() as trust:
        keys = sorted({*trust.trusted.get(namespace, ()), key.text})
        if len(keys) > _MAX_KEYS or len({*trust.trusted, namespace}) > _MAX_NAMESPACES:
            raise ConfigError(
                f"too many trusted keys for {namespace}",
                expected=f"{_MAX_KEYS} keys for each of {_MAX_NAMESPACES} namespaces",
                hint=f"adapterhub trust --remove '{namespace}' KEY",
            )
        _write(replace(trust, trusted={**trust.trusted, namespace: tuple(keys)}))


def distrust_key(namespace: Namespace, key: str | None = None) -> tuple[str, ...]:
    """Remove a key of a namespace, or all; return the keys that remain.

    Args:
        namespace: the namespace as it was trusted.
        key: the text of the key or its id; None removes the namespace.

    Raises:
        ConfigError: the key is not trusted for the namespace.
        FileError: the file cannot be read.
        OutputError: the file cannot be written.
    """
    with _changing() as trust:
        keys = trust.trusted.get(namespace, ())
        removed = {k for k in keys if key is None or key in (k, PublicKey(k).id)}
        if not removed:
            raise ConfigError(
                f"no such key is trusted for {namespace}",
                offenders=[f"{name}: {PublicKey(k).id}" for name in trust.trusted for k in
                           trust.trusted[name]],
                hint="adapterhub trust lists them",
            )  # fmt: skip
        kept = tuple(k for k in keys if k not in removed)
        others = {name: k for name, k in trust.trusted.items() if name != namespace}
        _write(replace(trust, trusted=others | ({namespace: kept} if kept else {})))
        return kept


def require_signatures(required: bool) -> None:
    """Set the general switch in the file.

    Raises:
        FileError: the file cannot be read.
        OutputError: the file cannot be written.
    """
    with _changing() as trust:
        _write(replace(trust, require_signatures=required))


@contextmanager
def requiring_signatures() -> Iterator[None]:
    """Require signatures of everything that is pulled or loaded in this context."""
    token = _required_here.set(True)
    try:
        yield
    finally:
        _required_here.reset(token)


def rule_of(
    reference: Reference, *, signed: bool = False, endpoint: str | None = None
) -> SigningRule:
    """Return whether an adapter must be signed, and by which keys.

    Args:
        reference: a folder or a published adapter.
        signed: whether the caller requires a signature.
        endpoint: the origin that `hf:` stands for, if not this machine's.

    Raises:
        FileError: the file of trusted keys cannot be read.
        ConfigError: `$ADAPTERHUB_REQUIRE_SIGNATURES` is neither on nor off.
    """
    trust = read_trust()
    required = signed or _required_here.get() or _by_environment() or trust.require_signatures
    if reference.kind == "folder":
        return SigningRule(
            required, frozenset(key for keys in trust.trusted.values() for key in keys)
        )
    if not trust.trusted:
        return SigningRule(required)
    owner, _, name = reference.name.lower().rpartition("/")
    places = addresses(reference, endpoint)
    covering = [n for n in trust.trusted if any(n.covers(p, owner, name) for p in places)]
    if not covering:
        return SigningRule(required)
    depth = max(namespace.depth for namespace in covering)
    # Two only if `hf:` and its endpoint are both named: either's keys are for this adapter.
    decisive = sorted(namespace for namespace in covering if namespace.depth == depth)
    keys = frozenset(key for namespace in decisive for key in trust.trusted[namespace])
    return SigningRule(True, keys, " and ".join(map(str, decisive)))


def _by_environment() -> bool:
    value = os.environ.get(REQUIRE_VARIABLE, "")
    if value.lower() not in _SWITCH:
        raise ConfigError(f"${REQUIRE_VARIABLE} is {value!r}", expected="1 or 0")
    return _SWITCH[value.lower()]


@contextmanager
def _changing() -> Iterator[Trust]:
    """Hold the lock that serializes changes of the file; yield its contents."""
    path = trust_path()
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            yield read_trust() if os.path.lexists(path) else Trust()


def _write(trust: Trust) -> None:
    tree = {
        "require_signatures": trust.require_signatures,
        "trusted": {str(name): list(keys) for name, keys in trust.trusted.items()},
        "version": 1,
    }
    replace_file(trust_path().resolve(), schema.canonical_json(tree))


def _namespace_problems(path: str, value: object) -> list[str]:
    try:
        if str(parse_namespace(str(value))) == value:
            return []
    except ConfigError as error:
        return [f"{path}: {error.problem}"]
    return [f"{path}: {schema.show(value)} is not in canonical form"]


_SCHEMA = schema.record(
    {
        "version": schema.integer(1, 1),
        "require_signatures": schema.boolean,
        "trusted": schema.mapping(
            _namespace_problems, schema.sequence(key_problems, 1, _MAX_KEYS), 0, _MAX_NAMESPACES
        ),
    }
)

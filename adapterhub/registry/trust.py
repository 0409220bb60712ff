"""Trusted keys of a user, and checks of an adapter's signatures against them.

    trust.json    {"require_signatures": false, "trusted": ["ed25519:..."], "version": 2}

The file is in the user's configuration folder, or at `$ADAPTERHUB_TRUST`. If signatures are
required (in this file, by `$ADAPTERHUB_REQUIRE_SIGNATURES`, or for one call), every adapter must be
signed by one of the keys, including adapters in folders.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from filelock import FileLock

from adapterhub.config.options import to_dict
from adapterhub.config.user_folders import user_folder
from adapterhub.errors import ConfigError, FileError, RegistryError, SignatureError
from adapterhub.files import schema
from adapterhub.files.atomic import UnreadableError, explained, read_file, replace_file
from adapterhub.files.native import SIGNATURE_FILE, Saved, read_signatures
from adapterhub.files.signature import (
    MAX_SIGNATURES,
    PublicKey,
    Signature,
    Statement,
    key_problems,
    signatures_to_json,
)
from adapterhub.registry.store import Entry, Reference, Store, version_number

TRUST_VARIABLE, REQUIRE_VARIABLE = "ADAPTERHUB_TRUST", "ADAPTERHUB_REQUIRE_SIGNATURES"
_MOST_KEYS = 1_000
_MAX_BYTES = 1 << 17  # enough for that many keys
_SWITCH: Mapping[str, bool] = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("", "0", "false", "no", "off"), False),
}
_required_here: ContextVar[bool] = ContextVar("required_here", default=False)


@dataclass(frozen=True)
class Trust:
    """The trusted public keys, sorted, and whether a signature by one of them is required."""

    keys: tuple[str, ...] = ()
    required: bool = False


@dataclass(frozen=True)
class _TrustFile:
    """The contents of the file."""

    require_signatures: bool
    trusted: Annotated[tuple[Annotated[str, key_problems], ...], schema.items(0, _MOST_KEYS)]
    version: Annotated[int, schema.integer(2, 2)] = 2


def trust_path() -> Path:
    """Return `$ADAPTERHUB_TRUST`, by default `trust.json` in the user's configuration folder."""
    path = os.environ.get(TRUST_VARIABLE)
    return Path(path) if path else user_folder("config") / "trust.json"


def read_trust() -> Trust:
    """Read the trusted keys; empty if the file does not exist.

    Raises:
        FileError: the file cannot be read; an unreadable file never disables the requirement.
    """
    path = trust_path()
    if not os.path.lexists(path):
        if os.environ.get(TRUST_VARIABLE):
            raise FileError(f"no file {path}, the one that ${TRUST_VARIABLE} names")
        return Trust()
    try:
        data = read_file(path.resolve(), 1, _MAX_BYTES, None)  # the user's own links are followed
    except UnreadableError as error:
        raise FileError(f"the trusted keys in {path} cannot be read: {error}") from None
    file, offenders = schema.parse_record(_TrustFile, data, _MAX_BYTES)
    if file is None:
        raise FileError(
            f"{path} is not a file of trusted keys",
            offenders=schema.shorten(offenders),
            hint="correct it, or delete it and trust the keys again: adapterhub trust KEY",
        )
    return Trust(file.trusted, file.require_signatures)


def trust_key(key: PublicKey) -> None:
    """Trust a key.

    Raises:
        ConfigError: there are too many keys.
        FileError: the file cannot be read.
        OutputError: the file cannot be written.
    """
    with _changing() as trust:
        keys = tuple(sorted({*trust.keys, key.text}))
        if len(keys) > _MOST_KEYS:
            raise ConfigError(
                "too many trusted keys",
                expected=f"at most {_MOST_KEYS}",
                hint="adapterhub trust --remove KEY",
            )
        _write(replace(trust, keys=keys))


def distrust_key(key: str) -> None:
    """Remove a key, by its text or its id.

    Raises:
        ConfigError: the key is not trusted.
        FileError: the file cannot be read.
        OutputError: the file cannot be written.
    """
    with _changing() as trust:
        kept = tuple(k for k in trust.keys if key not in (k, PublicKey(k).id))
        if kept == trust.keys:
            raise ConfigError(
                f"no key {key} is trusted",
                offenders=[f"trusted: {PublicKey(k).id}" for k in trust.keys],
                hint="adapterhub trust lists them",
            )
        _write(replace(trust, keys=kept))


def require_signatures(required: bool) -> None:
    """Set in the file whether signatures are required.

    Raises:
        FileError: the file cannot be read.
        OutputError: the file cannot be written.
    """
    with _changing() as trust:
        _write(replace(trust, required=required))


@contextmanager
def requiring_signatures() -> Iterator[None]:
    """Require signatures for all adapters that are pulled or loaded in this context."""
    token = _required_here.set(True)
    try:
        yield
    finally:
        _required_here.reset(token)


def current_trust(*, signed: bool = False) -> Trust:
    """Return the trusted keys, and whether a signature is required.

    Raises:
        FileError: the file of trusted keys cannot be read.
        ConfigError: `$ADAPTERHUB_REQUIRE_SIGNATURES` is neither on nor off.
    """
    trust = read_trust()
    required = signed or _required_here.get() or _by_environment() or trust.required
    return replace(trust, required=required)


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
    tree = to_dict(_TrustFile(trust.required, trust.keys))
    replace_file(trust_path().resolve(), schema.canonical_json(tree))


@dataclass(frozen=True)
class SignedSubject:
    """The subject of a signature: the manifest's digest and, in a store, name and version.

    `name` is None for a folder. `version` is None for a folder, and for a requested commit, branch
    or tag. It is "" if the newest was requested and the store does not number versions.
    """

    reference: Reference
    digest: str
    name: str | None = None
    version: str | None = None


@dataclass(frozen=True)
class CheckedSignature:
    """A signature that was compared with an adapter.

    Attributes:
        signature: the signature.
        problem: the reason why it is not valid for this adapter; None if it is valid.
        is_trusted: whether its key is trusted.
    """

    signature: Signature
    problem: str | None
    is_trusted: bool

    @property
    def is_valid(self) -> bool:
        """Whether the signature is valid for this adapter."""
        return self.problem is None

    def __str__(self) -> str:
        statement = self.signature.statement
        name = " ".join(filter(None, (statement.name, statement.version)))
        state = self.problem or f"valid, {'trusted' if self.is_trusted else 'not trusted'}"
        return f"key {self.signature.signer.id} for {name}: {state}"


def signed_subject(reference: Reference, digest: str, name: str, version: str) -> SignedSubject:
    """Describe a published version, for its signatures."""
    number = version_number(version)
    comparable = f"v{number}" if number else "" if reference.version is None else None
    return SignedSubject(reference, digest, name, comparable)


def checked_signatures(
    signatures: Iterable[Signature], subject: SignedSubject, trust: Trust
) -> list[CheckedSignature]:
    """Check signatures; return sufficient ones first.

    Raises:
        ConfigError: cryptography is not installed.
    """
    checked = [
        CheckedSignature(s, _problem(s, subject), s.key in trust.keys)
        for s in dict.fromkeys(signatures)
    ]
    return sorted(checked, key=lambda c: (not c.is_valid, not c.is_trusted, c.signature.key))


def check_enough(
    checked: Sequence[CheckedSignature], subject: SignedSubject, trust: Trust
) -> tuple[str, ...]:
    """Refuse an adapter without the required signatures; return its valid signers.

    Raises:
        SignatureError: a signature by a trusted key is required but missing.
    """
    if trust.required and not any(c.is_valid and c.is_trusted for c in checked):
        keys = ", ".join(sorted(PublicKey(key).id for key in trust.keys))
        raise SignatureError(
            f"{subject.reference} is not signed by a trusted key, and signatures are required",
            offenders=[str(c) for c in checked] or ["no signature"],
            expected=f"a signature by {keys}" if keys else "a key that you trust",
            hint="ask the publisher for a signature, or adapterhub trust KEY, with the signer's "
            "public key",
        )
    return tuple(c.signature.key for c in checked if c.is_valid)


def _problem(signature: Signature, subject: SignedSubject) -> str | None:
    if misfit := _misfit(signature.statement, subject):
        return misfit
    return None if signature.is_valid else "forged or damaged"


def _misfit(statement: Statement, subject: SignedSubject) -> str | None:
    """Return the reason why a statement does not match a subject, or None."""
    if statement.digest != subject.digest:
        return "for other files"
    if subject.name is not None and not same_name(statement.name, subject.name):
        return f"not for {subject.name}"
    if statement.version is not None and subject.version not in (None, statement.version):
        if not subject.version:
            return f"for {statement.version}, but the store gives no number: ask for a version"
        return f"for {statement.version}, not {subject.version}"
    return None


def same_name(stated: str, name: str) -> bool:
    """Compare names, ignoring case, and owners unless both have one."""
    first, second = stated.lower(), name.lower()
    if "/" in first and "/" in second:
        return first == second
    return first.rpartition("/")[2] == second.rpartition("/")[2]


def check_copy(pinned: Reference, folder: Path, digest: str, *, find: bool) -> tuple[str, ...]:
    """Check the signatures of a project's copy of a published version; return its valid signers.

    `pinned` has its version; `find` searches for signatures even if none is required.

    Raises:
        SignatureError: a signature by a trusted key is required but missing.
    """
    trust = current_trust()
    if not (trust.required or find):
        return ()
    subject = signed_subject(pinned, digest, pinned.name, str(pinned.version))
    return check_enough(checked_signatures(read_signatures(folder), subject, trust), subject, trust)


def published_signatures(
    reference: Reference, store: Store, entry: Entry, path: Path, trust: Trust
) -> list[CheckedSignature]:
    """Check the signatures of a published version, without requiring any.

    Signatures next to the manifest are checked first; if they do not suffice, later ones.
    """
    subject, beside = subject_of(reference, entry), read_signatures(path)
    checked = checked_signatures(beside, subject, trust)
    if any(c.is_valid and c.is_trusted for c in checked):
        return checked
    later = [s for s in _later_signatures(store, entry, trust) if s not in beside]
    if later:
        checked = checked_signatures((*beside, *later), subject, trust)
        _keep_beside(path, [c for c in checked if c.is_valid])
    return checked


def _later_signatures(store: Store, entry: Entry, trust: Trust) -> Sequence[Signature]:
    """List the signatures added later; empty if offline, unless one is required."""
    try:
        return store.signatures(entry)
    except RegistryError:
        if trust.required:
            raise
        return ()


def _keep_beside(path: Path, checked: Sequence[CheckedSignature]) -> None:
    """Add signatures to a store's own copy, so that further copies include them."""
    if not checked:
        return
    data = signatures_to_json(c.signature for c in checked[:MAX_SIGNATURES])
    staged = path / f".{SIGNATURE_FILE}.{secrets.token_hex(4)}.new"
    with contextlib.suppress(OSError):  # a cache that cannot be written: copies lack them
        staged.write_bytes(data)
        os.replace(staged, path / SIGNATURE_FILE)


def subject_of(reference: Reference, entry: Entry) -> SignedSubject:
    """Describe a version of a store, for its signatures."""
    return signed_subject(reference, entry.digest, entry.name, entry.version)


def refuse_foreign(reference: str, trust: Trust) -> None:
    """Refuse another library's adapter if a signature is required.

    Raises:
        SignatureError: one is required.
    """
    if trust.required:
        raise SignatureError(
            f"{reference} is another library's adapter, which cannot be signed, and signatures are"
            " required",
            hint="import it, sign the result with a key of your own, and load that",
        )


def signatures_beside(
    reference: Reference, saved: Saved, entry: Entry | None = None
) -> list[CheckedSignature]:
    """Check the signatures in the folder of an adapter; its store is not searched for later ones.

    Without an entry, only the digest is compared.

    Raises:
        FileError: the signature file is broken.
        ConfigError: the adapter has signatures, and cryptography is not installed.
    """
    if entry is None:
        subject = SignedSubject(Reference("folder", str(saved.folder)), saved.digest)
    else:
        subject = subject_of(reference, entry)
    return checked_signatures(saved.signatures(), subject, current_trust())

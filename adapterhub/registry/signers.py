"""Who signed an adapter, and whether that is enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adapterhub.errors import SignatureError
from adapterhub.files.signature import Signature, Statement
from adapterhub.registry.reference import Reference
from adapterhub.registry.store import version_number
from adapterhub.registry.trust import SigningRule


@dataclass(frozen=True)
class SignedSubject:
    """What signatures are compared with: the manifest's digest and, in a store, name and version.

    `name` is None for a folder. `version` is None for a folder, and for a commit, branch or tag
    that was asked for; it is "" if the newest was asked for and the store numbers no versions.
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
        problem: why it is not one of this adapter; None if it is.
        is_trusted: whether its key is trusted for this adapter.
    """

    signature: Signature
    problem: str | None
    is_trusted: bool

    @property
    def is_valid(self) -> bool:
        """Whether it is a signature of this adapter."""
        return self.problem is None

    def __str__(self) -> str:
        statement = self.signature.statement
        name = " ".join(filter(None, (statement.name, statement.version)))
        state = self.problem or f"valid, {'trusted' if self.is_trusted else 'not trusted'}"
        return f"key {self.signature.signer.id} for {name}: {state}"


def signed_subject(asked: Reference, digest: str, name: str, version: str) -> SignedSubject:
    """Describe a published version, for its signatures.

    Args:
        asked: the reference that was asked for.
        digest: the sha256 of the manifest.
        name: the adapter's name in its store.
        version: the version in its store.
    """
    number = version_number(version)
    comparable = f"v{number}" if number else "" if asked.version is None else None
    return SignedSubject(asked, digest, name, comparable)


def checked_signatures(
    signatures: Iterable[Signature], subject: SignedSubject, rule: SigningRule
) -> list[CheckedSignature]:
    """Check signatures, the ones that are enough first.

    Args:
        signatures: those found for the adapter.
        subject: the adapter.
        rule: which keys are trusted for it.

    Raises:
        ConfigError: cryptography is not installed.
    """
    checked = [
        CheckedSignature(s, _problem(s, subject), s.key in rule.keys)
        for s in dict.fromkeys(signatures)
    ]
    return sorted(checked, key=lambda c: (not c.is_valid, not c.is_trusted, c.signature.key))


def is_enough(checked: Sequence[CheckedSignature], rule: SigningRule) -> bool:
    """Return whether an adapter with these signatures satisfies a rule."""
    return not rule.required or any(c.is_valid and c.is_trusted for c in checked)


def signature_error(
    checked: Sequence[CheckedSignature], subject: SignedSubject, rule: SigningRule
) -> SignatureError:
    """Build the error for an adapter whose signatures are not enough.

    Args:
        checked: its signatures.
        subject: the adapter.
        rule: the rule that they do not satisfy.
    """
    reference = str(subject.reference)
    if rule.namespace:
        problem = f"{reference} is not signed by a key that is trusted for {rule.namespace}"
    else:
        problem = f"{reference} is not signed by a trusted key, and signatures are required"
    keys = ", ".join(sorted(key.id for key in rule.public_keys))
    namespace = rule.namespace or _suggested(subject.reference)
    add = f"adapterhub trust '{namespace}' KEY, with the signer's public key"
    return SignatureError(
        problem,
        offenders=[str(c) for c in checked] or ["no signature"],
        expected=f"a signature by {keys}" if keys else "a key that you trust for it",
        hint=f"ask the publisher for a signature, or {add}",
    )


def _problem(signature: Signature, subject: SignedSubject) -> str | None:
    if misfit := _misfit(signature.statement, subject):
        return misfit
    return None if signature.is_valid else "forged or damaged"


def _misfit(statement: Statement, subject: SignedSubject) -> str | None:
    """Return why a statement is not about a subject, or None."""
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
    """Compare names without regard to case, and to owners unless both have one."""
    first, second = stated.lower(), name.lower()
    if "/" in first and "/" in second:
        return first == second
    return first.rpartition("/")[2] == second.rpartition("/")[2]


def _suggested(reference: Reference) -> str:
    """Return the namespace to suggest for a reference: its owner's."""
    if reference.kind in ("folder", "local"):
        return "*"
    start = "hf:" if reference.kind == "hub" else f"{reference.host}/"
    return f"{start}{reference.name.partition('/')[0]}/*"

"""The signatures of an adapter (`adapter.sig`), detached from its manifest.

    {"signatures": [{"digest": ..., "key": "ed25519:...", "name": "polite", "signature": ...,
                     "version": "v3"}], "version": 1}

A signature states that the holder of this key assigns this name and, unless `version` is null, this
version to the adapter whose manifest has this sha256. The manifest contains the sha256 of the
tensors; the card is not covered. The signed bytes are `adapterhub-signature-v1`, a line feed, and
the canonical JSON of digest, name and version. The name prevents passing off an adapter as another
one of the same signer; the version prevents passing off an old adapter as a new one.

The file is canonical JSON of a closed schema. It is not part of a version: signatures may be added.

Keys are Ed25519, in files: a private key in PEM, a public key in one line, `ed25519:BASE64`. Base64
is URL-safe and without padding: it does not contain slashes, so keys never look like paths. A
private key is PKCS#8, optionally encrypted with a passphrase, and readable by its owner only. The
id of a key, the start of its sha256, is only displayed; programs compare whole keys.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

from adapterhub.config.options import from_file
from adapterhub.config.user_folders import expanded, sync_file
from adapterhub.errors import ConfigError, FileError, OutputError
from adapterhub.files import schema
from adapterhub.files.atomic import UnreadableError, explained, read_file
from adapterhub.files.schema import name_problems

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ed25519

SIGNATURE_FILE = "adapter.sig"
PASSPHRASE_VARIABLE = "ADAPTERHUB_KEY_PASSPHRASE"
KEY_PATTERN = r"ed25519:[A-Za-z0-9_-]{43}"
_MAX_KEY_BYTES = 16 << 10  # an encrypted PEM has some 400 bytes
_PRIME = 2**255 - 19
# The y coordinates of the eight points whose order divides 8. OpenSSL accepts them as public keys,
# and then accepts constant "signatures" of every message.
_SMALL_ORDER = {
    0,
    1,
    _PRIME - 1,
    0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7,
    0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826,
}
MAX_SIGNATURE_BYTES = 4 << 10  # room for MAX_SIGNATURES, with names of 100 characters
MAX_SIGNATURES = 8
_DOMAIN = b"adapterhub-signature-v1\n"


@dataclass(frozen=True)
class PublicKey:
    """A public key; `text` is `ed25519:BASE64`. Create it with `parse_public_key`."""

    text: str

    @property
    def id(self) -> str:
        """The start of the sha256 of the key's 32 bytes, in hexadecimal."""
        return hashlib.sha256(_raw(self.text)).hexdigest()[:16]

    def accepts(self, message: bytes, signature: bytes) -> bool:
        """Return whether a signature of a message was made with the private key."""
        key = _ed25519().Ed25519PublicKey.from_public_bytes(_raw(self.text))
        from cryptography.exceptions import InvalidSignature

        try:
            key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, repr=False)
class PrivateKey:
    """A private key; its representation does not show it."""

    inner: ed25519.Ed25519PrivateKey

    @property
    def public(self) -> PublicKey:
        """The public key."""
        raw = self.inner.public_key().public_bytes_raw()
        return PublicKey(f"ed25519:{base64_text(raw)}")

    def sign(self, message: bytes) -> bytes:
        """Return the 64 bytes of the signature of a message."""
        return self.inner.sign(message)


def parse_public_key(text: str) -> PublicKey:
    """Parse the line of a public key.

    Raises:
        ConfigError: it is not a key, or a weak key that anyone can sign for.
    """
    if not re.fullmatch(KEY_PATTERN, text):
        raise ConfigError("not a public key", expected="ed25519: and 43 letters, digits, - and _")
    raw = _raw(text)
    y = int.from_bytes(raw, "little") & (2**255 - 1)
    if f"ed25519:{base64_text(raw)}" != text or y >= _PRIME:
        raise ConfigError(f"{text} is not in canonical form", expected="a key as it was created")
    if y in _SMALL_ORDER:
        raise ConfigError(f"{text} is a point of small order: anybody can forge its signatures")
    return PublicKey(text)


def key_problems(path: str, value: object) -> list[str]:
    """Check the text of a public key in a JSON file."""
    if problems := schema.text(KEY_PATTERN, "an Ed25519 public key")(path, value):
        return problems
    try:
        parse_public_key(str(value))
    except ConfigError as error:
        return [f"{path}: {error.problem}"]
    return []


def read_public_key(key: str | Path) -> PublicKey:
    """Read a public key from its file, or parse its text.

    Raises:
        ConfigError: the text or the file does not contain a public key.
        FileError: the file cannot be read.
    """
    if str(key).startswith("ed25519:"):
        return parse_public_key(str(key))
    path = expanded(key)
    text = _read(path).decode("utf-8", "replace").strip()
    if "PRIVATE KEY" in text:
        hint = str(path.with_suffix(".pub"))
        raise ConfigError(f"{path} holds a private key", expected="the public one", hint=hint)
    try:
        return parse_public_key(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.problem}", expected=error.expected) from None


def read_private_key(
    path: str | Path | PrivateKey, ask: Callable[[], str] | None = None
) -> PrivateKey:
    """Read a private key; the passphrase is `$ADAPTERHUB_KEY_PASSPHRASE`, or the result of `ask`.

    A key is returned unchanged.

    Raises:
        FileError: the file cannot be read, lacks an Ed25519 key, or is readable by others.
        ConfigError: the passphrase is missing or wrong, or cryptography is not installed.
    """
    if isinstance(path, PrivateKey):
        return path
    path = expanded(path)
    data = _read(path)
    _refuse_open_permissions(path)
    ed25519 = _ed25519()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        inner = load_pem_private_key(data, _passphrase(path, ask) if b"ENCRYPTED" in data else None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        if b"ENCRYPTED" in data:
            raise ConfigError(f"{path}: the passphrase is wrong, or the file damaged") from None
        inner = None
    if not isinstance(inner, ed25519.Ed25519PrivateKey):
        raise FileError(f"{path} holds no Ed25519 private key", hint=f"adapterhub key new {path}")
    return PrivateKey(inner)


def write_key_pair(path: str | Path, passphrase: str | None = None) -> tuple[Path, PublicKey]:
    """Create a key pair: the private key in `path`, the public key next to it in `.pub`.

    Returns:
        The file of the public key, and the key.

    Raises:
        ConfigError: `path` ends in `.pub`, or cryptography is not installed.
        OutputError: a file exists, or cannot be written.
    """
    path = expanded(path)
    public_path = path.with_suffix(".pub")
    if path == public_path:
        raise ConfigError(f"{path} is the name of a public key", hint=f"{path.with_suffix('.key')}")
    key = PrivateKey(_ed25519().Ed25519PrivateKey.generate())
    if taken := [str(place) for place in (path, public_path) if os.path.lexists(place)]:
        raise OutputError("a key is never replaced", offenders=taken, hint="another file name")
    with explained(path):
        _create(path, _pem(key, passphrase), 0o600)
        _create(public_path, f"{key.public.text}\n".encode(), 0o644)
    return public_path, key.public


def base64_text(data: bytes) -> str:
    """Encode bytes in the base64 of URLs, without padding."""
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def base64_bytes(text: str) -> bytes:
    """Decode what `base64_text` encoded."""
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _raw(text: str) -> bytes:
    return base64_bytes(text.partition(":")[2])


def _read(path: Path) -> bytes:
    try:
        return read_file(path.resolve(), 1, _MAX_KEY_BYTES, None)  # users' own links are followed
    except UnreadableError as error:
        raise FileError(f"{path}: {error}", expected="the file of a key") from None


def _refuse_open_permissions(path: Path) -> None:
    mode = path.stat().st_mode & 0o777
    if os.name != "nt" and mode & 0o077:
        raise FileError(
            f"others on this machine can use the private key {path}: its mode is {mode:o}",
            expected="a file that only you can read",
            hint=f"chmod 600 {path}",
        )


def _passphrase(path: Path, ask: Callable[[], str] | None) -> bytes:
    passphrase = os.environ.get(PASSPHRASE_VARIABLE) or (ask() if ask else None)
    if not passphrase:
        raise ConfigError(f"{path} needs its passphrase", hint=f"set {PASSPHRASE_VARIABLE}")
    return passphrase.encode()


def _pem(key: PrivateKey, passphrase: str | None) -> bytes:
    from cryptography.hazmat.primitives import serialization

    encryption = (
        serialization.BestAvailableEncryption(passphrase.encode())
        if passphrase
        else serialization.NoEncryption()
    )
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.inner.private_bytes(encoding, form, encryption)


def _create(path: Path, data: bytes, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags, mode), "wb") as handle:
        handle.write(data)
        sync_file(handle)


def _ed25519() -> ModuleType:
    """Return cryptography's module of Ed25519."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ConfigError(
            "signatures need the package cryptography",
            hint='pip install "adapterhub[signatures]"',
        ) from error
    return ed25519


@dataclass(frozen=True, order=True)
class Statement:
    """The statement of a signer: the adapter with this digest has this name and version."""

    digest: str
    name: str
    version: str | None = None

    @property
    def message(self) -> bytes:
        """The bytes that are signed."""
        fields = {"digest": self.digest, "name": self.name, "version": self.version}
        return _DOMAIN + schema.canonical_json(fields)


def _check_name(path: str, value: object) -> list[str]:
    return name_problems(value)


@dataclass(frozen=True)
class Signature:
    """A signed statement: its fields, the text of the signer's public key, and the signature."""

    digest: Annotated[str, schema.text(r"[0-9a-f]{64}", "a sha256 in lower-case hexadecimal")]
    key: Annotated[str, key_problems]
    name: Annotated[str, _check_name]
    # Base64 decoders ignore four bits of the last character.
    signature: Annotated[str, schema.text(r"[A-Za-z0-9_-]{85}[AQgw]", "64 bytes in base64")]
    version: Annotated[str, schema.text(r"v[1-9][0-9]{0,8}", "a version, or null")] | None

    @property
    def statement(self) -> Statement:
        """The statement that was signed."""
        return Statement(self.digest, self.name, self.version)

    @property
    def signer(self) -> PublicKey:
        """The key that claims to have made the signature."""
        return PublicKey(self.key)

    @property
    def is_valid(self) -> bool:
        """Whether the key made the signature of the statement."""
        return self.signer.accepts(self.statement.message, base64_bytes(self.signature))


@dataclass(frozen=True)
class _SignatureFile:
    """The contents of `adapter.sig`."""

    signatures: Annotated[tuple[Signature, ...], schema.items(1, MAX_SIGNATURES)]
    version: Annotated[int, schema.integer(1, 1)] = 1


def sign_statement(statement: Statement, key: PrivateKey) -> Signature:
    """Sign a statement.

    Raises:
        OutputError: its name cannot be written to a file.
    """
    if problems := name_problems(statement.name):
        raise OutputError("this name cannot be signed", offenders=problems, hint="--name NAME")
    signature = base64_text(key.sign(statement.message))
    return Signature(
        statement.digest, key.public.text, statement.name, signature, statement.version
    )


def signatures_to_json(signatures: Iterable[Signature]) -> bytes:
    """Serialize signatures to the canonical bytes of `adapter.sig`.

    Raises:
        OutputError: there are too many, or they are too large.
    """
    unique = {(s.key, s.statement): s for s in signatures}.values()
    trees = [asdict(s) for s in unique]
    trees.sort(key=lambda tree: (tree["key"], schema.canonical_json(tree)))
    data = schema.canonical_json({"version": 1, "signatures": trees})
    if len(trees) > MAX_SIGNATURES or len(data) > MAX_SIGNATURE_BYTES:
        raise OutputError(
            f"{len(trees)} signatures in {len(data)} bytes",
            expected=f"at most {MAX_SIGNATURES} in {MAX_SIGNATURE_BYTES} bytes",
            hint=f"delete {SIGNATURE_FILE}, and sign again",
        )
    return data


def parse_signatures(data: bytes, source: str = SIGNATURE_FILE) -> tuple[Signature, ...]:
    """Parse the signatures in `data`, without checking them; `source` names the file in errors.

    Raises:
        FileError: `data` is not the canonical bytes of a valid signature file.
    """
    tree, offenders = schema.parse_object(data, MAX_SIGNATURE_BYTES)
    file, problems = from_file(_SignatureFile, tree)
    offenders = offenders or problems
    if not offenders and (changed := schema.not_canonical(tree, data)):
        offenders = [changed]
    if file is None or offenders:
        raise FileError(
            f"{source} is not a valid signature file",
            offenders=schema.shorten(offenders),
            hint="pull the adapter again; delete the file if the signature is not needed",
        )
    return file.signatures

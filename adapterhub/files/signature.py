"""The signatures of an adapter (`adapter.sig`), detached from its manifest.

    {"signatures": [{"digest": ..., "key": "ed25519:...", "name": "polite", "signature": ...,
                     "version": "v3"}], "version": 1}

A signature says: the holder of this key calls the adapter whose manifest has this sha256 by this
name and, unless `version` is null, this version. The manifest contains the sha256 of the tensors;
the card is not covered. Signed are the bytes `adapterhub-signature-v1`, a line feed, and the
canonical JSON of digest, name and version. The name prevents that an adapter is passed off as
another one of the same signer, the version that an old one is passed off as a new one.

The file is canonical JSON of a closed schema. It is no part of a version: signatures may be added.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from adapterhub.config.options import from_file
from adapterhub.errors import FileError, OutputError
from adapterhub.files import schema
from adapterhub.files.atomic import UnreadableError, read_file
from adapterhub.files.keys import PrivateKey, PublicKey, base64_bytes, base64_text, key_problems
from adapterhub.files.manifest import name_problems
from adapterhub.files.native import SIGNATURE_FILE

MAX_SIGNATURE_BYTES = 4 << 10  # for MAX_SIGNATURES of them, and names of 100 characters
MAX_SIGNATURES = 8
_DOMAIN = b"adapterhub-signature-v1\n"


@dataclass(frozen=True, order=True)
class Statement:
    """What a signer says: the adapter with this digest has this name and version."""

    digest: str
    name: str
    version: str | None = None

    @property
    def message(self) -> bytes:
        """The bytes that are signed."""
        fields = {"digest": self.digest, "name": self.name, "version": self.version}
        return _DOMAIN + schema.canonical_json(fields)


@dataclass(frozen=True)
class Signature:
    """A statement, the text of the signer's public key, and the signature in base64."""

    statement: Statement
    key: str
    signature: str

    @property
    def signer(self) -> PublicKey:
        """The key that the signature claims to be of."""
        return PublicKey(self.key)

    @property
    def is_valid(self) -> bool:
        """Whether the key made the signature of the statement."""
        return self.signer.accepts(self.statement.message, base64_bytes(self.signature))


def _check_name(path: str, value: object) -> list[str]:
    return name_problems(value)


@dataclass(frozen=True)
class _Record:
    """A signature as it is in a file."""

    digest: Annotated[str, schema.text(r"[0-9a-f]{64}", "a sha256 in lower-case hexadecimal")]
    key: Annotated[str, key_problems]
    name: Annotated[str, _check_name]
    # Of the last character, base64 decoders ignore four bits.
    signature: Annotated[str, schema.text(r"[A-Za-z0-9_-]{85}[AQgw]", "64 bytes in base64")]
    version: Annotated[str, schema.text(r"v[1-9][0-9]{0,8}", "a version, or null")] | None

    def parsed(self) -> Signature:
        statement = Statement(self.digest, self.name, self.version)
        return Signature(statement, self.key, self.signature)


@dataclass(frozen=True)
class _SignatureFile:
    """The contents of `adapter.sig`."""

    signatures: Annotated[tuple[_Record, ...], schema.items(1, MAX_SIGNATURES)]
    version: Annotated[int, schema.integer(1, 1)] = 1


def sign_statement(statement: Statement, key: PrivateKey) -> Signature:
    """Sign a statement.

    Raises:
        OutputError: its name cannot be written to a file.
    """
    if problems := name_problems(statement.name):
        raise OutputError("this name cannot be signed", offenders=problems, hint="--name NAME")
    return Signature(statement, key.public.text, base64_text(key.sign(statement.message)))


def signatures_to_json(signatures: Iterable[Signature]) -> bytes:
    """Serialize signatures to the canonical bytes of `adapter.sig`.

    Raises:
        OutputError: they are too many or too large.
    """
    unique = {(s.key, s.statement): s for s in signatures}.values()
    trees = [{**asdict(s.statement), "key": s.key, "signature": s.signature} for s in unique]
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
    if not offenders and schema.canonical_json(tree) != data:
        offenders = ["the bytes are not canonical: the file was edited or damaged"]
    if file is None or offenders:
        raise FileError(
            f"{source} is not a valid signature file",
            offenders=schema.shorten(offenders),
            hint="pull the adapter again; delete the file if nobody is to check who signed",
        )
    return tuple(each.parsed() for each in file.signatures)


def read_signatures(folder: Path) -> tuple[Signature, ...]:
    """Read the signatures beside an adapter's manifest; empty if there is no such file.

    Raises:
        FileError: the file is a link, too large, or not valid.
    """
    path = folder / SIGNATURE_FILE
    try:
        data = read_file(path, 1, MAX_SIGNATURE_BYTES, None)
    except UnreadableError as error:
        if str(error) == "missing":
            return ()
        raise FileError(f"{path}: {error}", expected="a small regular file") from None
    return parse_signatures(data, str(path))

"""Size and sha256 of a file, or of its beginning."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The identity of the bytes of a file, or of its first `size` bytes."""

    size: int
    sha256: str


def file_digest(path: Path, most: int | None = None) -> FileDigest:
    """Compute the digest of a file, or of its first `most` bytes; use little memory."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK if most is None else min(_CHUNK, most - size)):
            digest.update(chunk)
            size += len(chunk)
    return FileDigest(size, digest.hexdigest())

"""A registry's files as objects of a bucket (S3, Google Cloud Storage, Azure), through obstore.

Nothing is locked: a file is replaced only if it has not changed since it was read. The manifest of
a version is uploaded last.

Credentials, endpoint and region come from the environment, as the cloud's own tools read them:
AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME...
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from adapterhub.errors import ConfigError, FileError, RegistryError
from adapterhub.files.atomic import write_files
from adapterhub.files.native import MANIFEST_FILE, Saved
from adapterhub.registry.cached_storage import RemoteStorage
from adapterhub.registry.store import ConflictError, Stored
from adapterhub.registry.version_files import DATE_FILE, copy_adapter

_PIECE = 4 << 20  # bytes of a download held in memory
_RETRIES: Any = {"max_retries": 4, "retry_timeout": timedelta(seconds=60)}


class Bucket(RemoteStorage):
    """The objects below a prefix.

    Args:
        url: s3://bucket/prefix, gs://bucket/prefix or az://container/prefix.
        objects: a store of obstore, instead of the one at the URL.
    """

    def __init__(self, url: str, objects: Any = None) -> None:
        self.location = url.rstrip("/")
        self._objects = objects if objects is not None else open_bucket(self.location)
        self._is_proven = False

    def exists(self) -> bool:
        """Return whether the bucket can be read."""
        self.folders()
        return True

    def folders(self, prefix: str = "") -> list[str]:
        """List the folders directly below a prefix."""
        with self._reached():
            paths = self._objects.list_with_delimiter(prefix or None)["common_prefixes"]
            return sorted(path for path in paths if not path.rpartition("/")[2].startswith("."))

    def files(self, prefix: str = "") -> dict[str, str]:
        """Return the files below a prefix."""
        with self._reached():
            chunks = self._objects.list(prefix or None)
            stamped = ((meta["path"], str(meta["e_tag"])) for some in chunks for meta in some)
            return dict(sorted(stamped))

    def receive(self, path: str, most: int, known: str = "") -> Stored | None:
        """Receive an object; skip the bytes if its tag is still `known`."""
        from obstore.exceptions import NotModifiedError

        with self._reached():
            try:
                unless = {"options": {"if_none_match": known}} if known else {}
                result = self._get(path, most, **unless)
            except NotModifiedError:
                return Stored(b"", known)
            return result and Stored(bytes(result.bytes()), str(result.meta["e_tag"]))

    def create(self, path: str, source: Saved, digest: str, date: bytes) -> None:
        """Upload the files of an adapter, the manifest last."""
        with TemporaryDirectory(prefix="adapterhub-") as staged:
            copy = copy_adapter(source, Path(staged) / "copy", digest, beside=True)
            self.write(f"{path}/{DATE_FILE}", date)
            for file in sorted(copy.iterdir(), key=lambda file: file.name == MANIFEST_FILE):
                self.write(f"{path}/{file.name}", file)

    def writing(self, path: str) -> AbstractContextManager[None]:
        """Do nothing: conditional writes exclude other writers."""
        return nullcontext()

    def remove(self, path: str) -> None:
        """Delete the objects of a version, the manifest first."""
        manifest = f"{path}/{MANIFEST_FILE}"
        for file in sorted(self.files(f"{path}/"), key=lambda file: file != manifest):
            self.delete(file)

    def download(self, path: str, target: Path, most: int, sha256: str | None = None) -> None:
        """Write an object to a new file; the caller checks the digest."""
        with self._reached():
            if (result := self._get(path, most)) is not None:
                write_files(target.parent, {target.name: map(bytes, result.stream(_PIECE))})

    def _get(self, path: str, most: int, **options: Any) -> Any:
        try:
            result = self._objects.get(path, **options)
        except FileNotFoundError:
            return None
        if (size := result.meta["size"]) > most:
            raise FileError(f"{self.location}/{path} has {size:,} bytes", expected=f"<= {most:,}")
        return result

    def write(self, path: str, data: bytes | Path) -> None:
        """Create or replace an object, from bytes or a file.

        Raises:
            RegistryError: the bucket cannot be written, or does not prevent conflicting writes.
        """
        self._prove()
        with self._reached():
            self._objects.put(path, data)

    def replace(self, path: str, data: bytes, old: Stored | None) -> None:
        """Replace a file if it has not changed since it was read."""
        self._prove()
        self._replace(path, data, old.tag if old else None)

    def _replace(self, path: str, data: bytes, e_tag: str | None) -> str:
        """Replace the object with this tag, or create one; return the new tag."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._reached():
            try:
                written = self._objects.put(
                    path, data, mode={"e_tag": e_tag} if e_tag else "create"
                )
            except (AlreadyExistsError, PreconditionError, FileNotFoundError) as error:
                raise ConflictError(path) from error
        return str(written["e_tag"])

    def _prove(self) -> None:
        """Check with a test object, before the first write, that a late writer is refused.

        Some servers ignore one or all conditions of a write. There, all but one of several
        concurrent publishers would lose their version.

        Raises:
            RegistryError: a late writer is not refused, or the first writer is.
        """
        if self._is_proven:
            return
        probe = f".adapterhub-probe-{secrets.token_hex(8)}"
        try:
            first = self._replace(probe, b"1", None)
            if not self._conflicts(probe, b"2", None):
                raise self._unsafe("If-None-Match: *")
            self._replace(probe, b"3", first)
            if not self._conflicts(probe, b"4", first):
                raise self._unsafe("If-Match")
        except ConflictError:
            raise self._unsafe("If-Match, of a writer that is the only one,") from None
        finally:
            with suppress(RegistryError):  # a token with write access may lack permission to delete
                self._delete(probe)
        self._is_proven = True

    def _conflicts(self, path: str, data: bytes, e_tag: str | None) -> bool:
        try:
            self._replace(path, data, e_tag)
        except ConflictError:
            return True
        return False

    def _unsafe(self, condition: str) -> RegistryError:
        return RegistryError(
            f"{self.location} does not obey the condition {condition} of a write: of publishers at "
            "the same moment, all but one would lose their version; nothing was written",
            expected="a bucket whose server obeys If-Match and If-None-Match, as S3, Google Cloud "
            "and Azure do",
            hint="--registry FOLDER, on a disk that all publishers share",
        )

    def delete(self, path: str) -> None:
        """Delete an object if it exists.

        Raises:
            RegistryError: the bucket cannot be written, or does not prevent conflicting writes.
        """
        self._prove()
        self._delete(path)

    def _delete(self, path: str) -> None:
        with self._reached():
            try:
                self._objects.delete(path)
            except FileNotFoundError:
                return

    @contextmanager
    def _reached(self) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError) as error:
            raise RegistryError(
                f"{self.location} cannot be used: {start_of_error(error)}",
                expected="a bucket that these credentials may list, read and write",
                hint="the cloud's environment variables: AWS_ACCESS_KEY_ID, AWS_REGION, "
                "AWS_ENDPOINT_URL, ...",
            ) from error


def open_bucket(url: str) -> Any:
    """Return the store of obstore for a URL.

    Raises:
        ConfigError: the URL is not a bucket's, or the library is not installed.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise ConfigError(
            f"{url} needs the library obstore, which is not installed",
            hint='pip install "adapterhub[buckets]"',
        ) from None
    try:
        return from_url(url, retry_config=_RETRIES)
    except (BaseError, ValueError) as error:
        raise ConfigError(
            f"cannot open {url}: {start_of_error(error)}",
            expected="s3://bucket/prefix, gs://bucket/prefix or az://container/prefix",
        ) from error


def start_of_error(error: Exception) -> str:
    """Return the start of an error of obstore, without its details for developers."""
    return re.sub(r"\s+", " ", str(error).partition("\n\nDebug")[0])[:400]

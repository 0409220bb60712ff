"""Objects of a bucket (S3, Google Cloud Storage, Azure) through obstore, with our errors.

Credentials, endpoint and region come from the environment, as the cloud's own tools read them:
AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME...
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from adapterhub.errors import ConfigError, FileError, RegistryError

SCHEMES = ("s3", "gs", "az", "abfss")
_RETRIES: Any = {"max_retries": 4, "retry_timeout": timedelta(seconds=60)}


class ConflictError(Exception):
    """Another writer was first: the object exists, or has changed."""


@dataclass(frozen=True)
class Stored:
    """An object's bytes, and the tag that changes with them."""

    data: bytes
    e_tag: str


def is_bucket(location: object) -> bool:
    """Return whether a text is the URL of a bucket: s3://bucket/prefix, gs://..., az://..."""
    scheme, found, _ = str(location).partition("://")
    return bool(found) and scheme in SCHEMES


class Bucket:
    """The objects below a prefix; all paths are relative to it.

    Args:
        url: s3://bucket/prefix, gs://bucket/prefix or az://container/prefix.
        objects: a store of obstore, in place of that of the URL.
    """

    def __init__(self, url: str, objects: Any = None) -> None:
        self.url = url.rstrip("/")
        self._objects = objects if objects is not None else _open(self.url)

    def e_tags(self, prefix: str = "") -> dict[str, str]:
        """Return the tag of each object below a prefix, by its path, sorted."""
        with self._reached():
            chunks = self._objects.list(prefix or None)
            found = ((meta["path"], str(meta["e_tag"])) for some in chunks for meta in some)
            return dict(sorted(found))

    def folders(self) -> list[str]:
        """List the first parts of the paths of all objects."""
        with self._reached():
            return sorted(self._objects.list_with_delimiter()["common_prefixes"])

    def read(self, path: str, most: int) -> Stored | None:
        """Read an object; None if there is none.

        Raises:
            FileError: it is larger than `most` bytes.
            RegistryError: the bucket cannot be read.
        """
        with self._reached():
            try:
                found = self._objects.get(path)
            except FileNotFoundError:
                return None
            if found.meta["size"] > most:
                size = found.meta["size"]
                raise FileError(f"{self.url}/{path} has {size:,} bytes", expected=f"<= {most:,}")
            return Stored(bytes(found.bytes()), str(found.meta["e_tag"]))

    def write(self, path: str, data: bytes) -> None:
        """Write an object, or replace it.

        Raises:
            RegistryError: the bucket cannot be written.
        """
        with self._reached():
            self._objects.put(path, data)

    def replace(self, path: str, data: bytes, old: Stored | None) -> None:
        """Replace what was read, in one step; `old` is None if there was nothing.

        Raises:
            ConflictError: another writer was first.
            RegistryError: the bucket cannot be written.
        """
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._reached():
            try:
                self._objects.put(path, data, mode={"e_tag": old.e_tag} if old else "create")
            except (AlreadyExistsError, PreconditionError, FileNotFoundError) as error:
                raise ConflictError(path) from error

    def delete(self, path: str) -> None:
        """Delete an object, which may be gone already.

        Raises:
            RegistryError: the bucket cannot be written.
        """
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
                f"{self.url} cannot be used: {_first_line(error)}",
                expected="a bucket that these credentials may list, read and write",
                hint="the cloud's environment variables: AWS_ACCESS_KEY_ID, AWS_REGION, "
                "AWS_ENDPOINT_URL, ...",
            ) from error


def _open(url: str) -> Any:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise ConfigError(
            f"the registry {url} needs the library obstore, which is not installed",
            hint='pip install "adapterhub[buckets]"',
        ) from None
    try:
        return from_url(url, retry_config=_RETRIES)
    except (BaseError, ValueError) as error:
        raise ConfigError(
            f"cannot open the registry {url}: {_first_line(error)}",
            expected="s3://bucket/prefix, gs://bucket/prefix or az://container/prefix",
        ) from error


def _first_line(error: Exception) -> str:
    """Return the start of an error of obstore, which goes on with its source for developers."""
    return re.sub(r"\s+", " ", str(error).partition("\n\nDebug")[0])[:400]

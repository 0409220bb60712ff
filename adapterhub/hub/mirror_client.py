"""The client with which a mirror fetches content from an upstream hub.

It uses the client of `adapterhub pull`, so the same limits apply: the permitted hosts and
redirects, the size and time of a response, and the check of each file's hash. No header of a
visitor is forwarded. The operator's own token is sent only to the upstream, and only for the
repositories that the operator lists.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from adapterhub.errors import ConfigError, FileError, NotPublishedError, RegistryError
from adapterhub.hub.blobs import BlobInfo
from adapterhub.registry.hub_client import Expected, GatedError, HubClient, UnreachableError
from adapterhub.registry.hub_reader import HubReader, Refs, RepositoryFiles
from adapterhub.registry.tokens import VARIABLE, token_for
from adapterhub.web.errors import (
    GatedUpstreamError,
    HubRefusal,
    LyingUpstreamError,
    MissingRepositoryError,
    MissingRevisionError,
    UpstreamError,
)

ASK_SECONDS = 5.0  # for repository metadata: clients wait ten for the headers


class Upstream:
    """The upstream hub of a mirror.

    Args:
        url: its address.
        with_token: repository names or patterns that are requested with the token that the
            environment has for this hub.

    Raises:
        ConfigError: the environment has no token.
    """

    def __init__(self, url: str, with_token: Sequence[str] = ()) -> None:
        self.url = url.rstrip("/")
        self._with_token = [pattern.casefold() for pattern in with_token]
        self._token = token_for(self.url) if with_token else None
        if with_token and self._token is None:
            raise ConfigError(
                f"no token is set for {self.url}, and --upstream-token names a repository for it",
                expected=f'${VARIABLE}="{self.url}=TOKEN"',
                hint=f"adapterhub login {self.url}",
            )

    def refs(self, type: str, name: str) -> Refs:
        """Return the branches and tags of a repository.

        Raises:
            MissingRepositoryError: it does not exist or requires a token.
            HubRefusal: the upstream does not respond, or not as a hub.
        """
        missing = MissingRepositoryError(
            f"{name} is neither on this hub nor, for all to read, on its upstream {self.url}"
        )
        with _explained(name, missing):
            return self._reader(type, name, ASK_SECONDS).refs(name)

    def snapshot(self, type: str, name: str, revision: str) -> RepositoryFiles:
        """Return a commit and the entries of its files.

        Raises:
            MissingRevisionError: the revision does not exist.
            HubRefusal: the upstream does not respond, or not as a hub.
        """
        with _explained(f"{name} at {revision}", MissingRevisionError(revision)):
            return self._reader(type, name, ASK_SECONDS).snapshot(name, revision)

    def download(
        self,
        type: str,
        name: str,
        commit: str,
        path: str,
        blob: BlobInfo,
        target: Path,
        progress: Callable[[int], object],
        patience: float | None = None,
    ) -> BlobInfo:
        """Download a file to a new path; return both of its hashes (one was known).

        Raises:
            HubRefusal: the upstream does not provide the file, or sends a different one.
        """
        expected = Expected(blob.size, blob.size, blob.sha256 or None, blob.git_sha1 or None)
        missing = LyingUpstreamError(f"{path}: {self.url} lists it and does not give it")
        with _explained(path, missing):
            reader = self._reader(type, name, patience)
            result = reader.download(name, commit, path, target, expected, progress=progress)
        assert result.sha256 is not None
        assert result.git_sha1 is not None
        return BlobInfo(result.sha256, blob.size, result.git_sha1)

    def _reader(self, type: str, name: str, patience: float | None = None) -> HubReader:
        """Return a reader for one request: a client remembers that a server was slow."""
        named = any(fnmatch.fnmatchcase(name.casefold(), each) for each in self._with_token)
        client = HubClient(self.url, self._token if named else None, patience=patience)
        return HubReader(client, f"{self.url}/", type)


@contextmanager
def _explained(subject: str, missing: HubRefusal) -> Iterator[None]:
    """Translate an upstream error for a client of this hub."""
    try:
        yield
    except UnreachableError as error:
        raise UpstreamError(
            f"{subject} is not kept here, and the upstream fails: {error.problem}; try again later"
        ) from error
    except GatedError as error:
        raise GatedUpstreamError(
            f"{error.problem}: its owner must let the operator of this hub have it, who then names "
            "it with --upstream-token"
        ) from None
    except NotPublishedError:
        raise missing from None
    except (RegistryError, FileError) as error:
        message = "; ".join((error.problem, *error.offenders))
        raise LyingUpstreamError(
            f"{subject} is not cached here, and the upstream's files cannot be: {message}"
        ) from error

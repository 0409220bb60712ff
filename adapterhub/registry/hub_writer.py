"""Write to a hub: repositories, commits and tags, through huggingface_hub's client.

Each request names its endpoint and its token; `guarded_hub` checks the answers before the client
uses them, and keeps the token from other origins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from adapterhub.backbones.hub_guard import guarded_hub
from adapterhub.errors import BackboneError, ConfigError, RegistryError
from adapterhub.registry.hub_client import login_hint
from adapterhub.registry.tokens import echoes

_MOST_CHARACTERS = 300  # of a message of the server


class HubWriter:
    """Write to the repositories of one hub; `prefix` starts the references to them."""

    def __init__(self, base: str, token: str | None, prefix: str) -> None:
        self._base, self._token, self._prefix = base, token, prefix
        self._api = HfApi(endpoint=base, token=token or False, library_name="adapterhub")

    def create(self, name: str, *, private: bool) -> None:
        """Create a repository unless it exists."""
        with self._guarded(name):
            self._api.create_repo(name, private=private, exist_ok=True)

    def commit(
        self, name: str, files: Mapping[str, bytes | Path], message: str, head: str | None
    ) -> str:
        """Commit files to `main`; return the commit.

        Args:
            name: the repository.
            files: the contents, or the file that has them, by file name.
            message: the message of the commit.
            head: the commit that must still be the head.
        """
        operations = [CommitOperationAdd(path, data) for path, data in sorted(files.items())]
        with self._guarded(name):
            commit = self._api.create_commit(
                name, operations, commit_message=message, parent_commit=head, revision="main"
            )
        return str(commit.oid)

    def create_tag(self, name: str, tag: str, commit: str) -> None:
        """Create a tag; an existing one is not moved.

        Args:
            name: the repository.
            tag: the new tag.
            commit: its commit.
        """
        with self._guarded(name):
            self._api.create_tag(name, tag=tag, revision=commit)

    def delete_tag(self, name: str, tag: str) -> None:
        """Delete a tag."""
        with self._guarded(name):
            self._api.delete_tag(name, tag=tag)

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Guard the client; raise its errors as ours, without the texts that it has from a server.

        `from None` keeps the originals out of tracebacks: they quote the server.
        """
        address = f"{self._prefix}{name}"
        try:
            with guarded_hub(self._base):
                yield
        except BackboneError as error:  # of the guard
            raise RegistryError(f"{address}: {error.problem}") from None
        except HTTPError as error:
            raise self._error(error, address) from None
        except HFValidationError as error:
            raise ConfigError(f"invalid repository name {name!r}: {error}") from None
        except (OfflineModeIsEnabled, OSError) as error:
            raise _unreachable(address, error) from None
        except (KeyError, TypeError, ValueError, AttributeError, AssertionError, RecursionError):
            raise RegistryError(f"{address}: the hub's answer is malformed") from None

    def _error(self, error: HTTPError, address: str) -> RegistryError:
        if not isinstance(error, HfHubHTTPError):
            return _unreachable(address, error)
        status = error.response.status_code
        if isinstance(error, GatedRepoError):
            return RegistryError(f"{address} is gated", hint="request access on its page")
        if isinstance(error, RepositoryNotFoundError) or status == 401:
            return RegistryError(
                f"{address} does not exist, or you have no access to it",
                hint=login_hint(self._base),
            )
        if status == 403:
            return RegistryError(
                f"{address}: your token lacks the permission", hint="use a token with write access"
            )
        if status in (409, 412):
            return RegistryError(f"{address} was changed by another writer", hint="try again")
        message = str(error.server_message or "")[:_MOST_CHARACTERS]
        if echoes(message, self._token):
            message = "its message repeats your token, and is not shown"
        return RegistryError(
            f"{address}: the hub answered {status}" + f": {message}" * bool(message)
        )


def _unreachable(address: str, error: Exception) -> RegistryError:
    return RegistryError(
        f"{address} cannot be reached: {type(error).__name__}",
        hint="check the network, HF_HUB_OFFLINE and HF_ENDPOINT",
    )

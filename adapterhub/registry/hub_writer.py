"""Write to a hub: repositories, commits and tags, through huggingface_hub's client, and the card.

Each request names its endpoint and its token; `guarded_hub` checks the answers before the client
uses them, and keeps the token from other origins. The model card of a published adapter has the
Hub's metadata in addition to its text.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    EvalResult,
    HfApi,
    ModelCard,
    ModelCardData,
)
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    get_session,
    hf_raise_for_status,
)

from adapterhub.backbones.hub_network import guarded_hub
from adapterhub.errors import BackboneError, ConfigError, RegistryError
from adapterhub.files import schema
from adapterhub.registry.hub_client import login_hint, network_hint
from adapterhub.registry.store import DEFAULT_HUB, Entry
from adapterhub.registry.tokens import echoes

_MOST_CHARACTERS = 300  # maximum length of a message from the server
_FIELDS = (
    "version", "digest", "fingerprint", "methods", "task", "metrics", "tags", "size", "parameters",
    "backbone", "description", "license", "language", "topics",
)  # fmt: skip

_LISTS = ("methods", "tags", "language", "topics")
_WORD = schema.text(r"[\w.:+/-]{1,200}", "a word")
_TEXT = schema.text(r"(?s).{0,2000}", "a text", null=True)
_COUNT = schema.integer(0, 2**63 - 1)
# Of a section of a stranger's card, whose values are printed and compared.
_SECTION = {
    "version": schema.text(r"v[0-9]{1,9}", "a version"),
    "digest": schema.text(r"[0-9a-f]{64}", "a sha256"),
    **dict.fromkeys(("fingerprint", "backbone"), _WORD),
    **dict.fromkeys(("task", "description", "license"), _TEXT),
    **dict.fromkeys(("size", "parameters"), _COUNT),
    **{name: schema.sequence(schema.text(r"(?s).{1,200}", "a text"), 0, 1000) for name in _LISTS},
    "metrics": schema.mapping(schema.text(r"(?s).{1,200}", "a metric"), schema.number),
}


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
        self,
        name: str,
        files: Mapping[str, bytes | Path],
        message: str,
        head: str | None,
        removed: Collection[str] = (),
    ) -> str:
        """Commit files to `main`; return the commit.

        `files` has contents, or the file with the contents, by name; `removed` has the names of
        files to remove. `head` must still be the head.
        """
        with self._guarded(name), ExitStack() as stack:
            if self._base != DEFAULT_HUB:
                stack.enter_context(_without_words_on_xet())
            operations: list[CommitOperationAdd | CommitOperationDelete] = [
                CommitOperationAdd(path, self._sent(data, stack))
                for path, data in sorted(files.items())
            ]
            operations += [CommitOperationDelete(path, is_folder=False) for path in removed]
            commit = self._api.create_commit(
                name, operations, commit_message=message, parent_commit=head, revision="main"
            )
        return str(commit.oid)

    def _sent(self, data: bytes | Path, stack: ExitStack) -> bytes | Path | BinaryIO:
        """Return contents in the form that any hub accepts: open files never go to Xet.

        The client does not check whether a hub supports Xet.
        """
        if self._base == DEFAULT_HUB:
            return data
        return BytesIO(data) if isinstance(data, bytes) else stack.enter_context(open(data, "rb"))

    def create_tag(self, name: str, tag: str, commit: str) -> None:
        """Create a tag; an existing one is not moved."""
        with self._guarded(name):
            self._api.create_tag(name, tag=tag, revision=commit)

    def delete_tag(self, name: str, tag: str) -> None:
        """Delete a tag."""
        with self._guarded(name):
            self._api.delete_tag(name, tag=tag)

    def move_tag(self, name: str, tag: str, commit: str) -> None:
        """Move a tag in one step, on a hub of adapterhub."""
        self._own("PUT", name, f"tag/{quote(tag, safe='')}", json={"revision": commit})

    def delete_version(self, name: str, version: str) -> None:
        """Delete a version permanently from a hub of adapterhub."""
        self._own("DELETE", name, f"versions/{version}")

    def _own(self, method: str, name: str, path: str, **options: Any) -> None:
        """Send a request that is not in the Hub's protocol."""
        url = f"{self._base}/api/adapterhub/models/{name}/{path}"
        headers = build_hf_headers(token=self._token or False, library_name="adapterhub")
        with self._guarded(name):
            hf_raise_for_status(get_session().request(method, url, headers=headers, **options))

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Guard the client; convert its errors to ours, without text from the server.

        `from None` keeps the originals out of tracebacks: they quote the server.
        """
        address = f"{self._prefix}{name}"
        try:
            with guarded_hub(self._base):
                yield
        except BackboneError as error:  # an error of the guard
            raise RegistryError(f"{address}: {error.problem}") from None
        except HTTPError as error:
            raise self._error(error, address) from None
        except HFValidationError as error:
            raise ConfigError(f"invalid repository name {name!r}: {error}") from None
        except (OfflineModeIsEnabled, OSError) as error:
            raise _unreachable(address, error, self._base) from None
        except (KeyError, TypeError, ValueError, AttributeError, AssertionError, RecursionError):
            raise RegistryError(f"{address}: the hub's answer is malformed") from None
        except RuntimeError as error:  # an error of the client about a file that it could not send
            cause = error.__cause__
            if isinstance(cause, HTTPError):
                raise self._error(cause, address) from None
            raise _unreachable(address, error, self._base) from None

    def _error(self, error: HTTPError, address: str) -> RegistryError:
        if not isinstance(error, HfHubHTTPError):
            return _unreachable(address, error, self._base)
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
        message = str(error.server_message or "")[:_MOST_CHARACTERS]
        if echoes(message, self._token):
            message = "its message repeats your token, and is not shown"
        if status in (409, 412):
            detail = f" ({message})" if message else ""
            return RegistryError(
                f"{address} was changed by another writer{detail}", hint="try again"
            )
        return RegistryError(
            f"{address}: the hub answered {status}" + f": {message}" * bool(message)
        )


def _unreachable(address: str, error: Exception, base: str) -> RegistryError:
    return RegistryError(
        f"{address} cannot be reached: {type(error).__name__}", hint=network_hint(base)
    )


def hub_card(card: bytes, entry: Entry) -> bytes:
    """Add the metadata indexed by the Hub to a card; the text and other metadata are kept."""
    model_card = ModelCard(card.decode("utf-8", "replace"), ignore_metadata_errors=True)
    metadata: dict[str, Any] = model_card.data.to_dict()  # type: ignore[no-untyped-call]
    base_model = {"base_model": entry.backbone, "base_model_relation": "adapter"}
    values = {name: _plain(getattr(entry, name)) for name in _FIELDS}
    fields = {name: value for name, value in values.items() if value not in (None, [])}
    data = ModelCardData(
        **{
            **metadata,
            **(base_model if "/" in entry.backbone else {}),
            "library_name": "adapterhub",
            "model_name": entry.name.rpartition("/")[2],
            "tags": sorted({*metadata.get("tags", []), "adapterhub", *entry.methods}),
            "eval_results": _results(entry),
            "adapterhub": fields,
        }
    )
    text = f"---\n{data.to_yaml()}\n---\n{model_card.text.lstrip()}"
    return text.replace("\r\n", "\n").encode()


def entry_from_card(card: Any, name: str, prefix: str) -> Entry | None:
    """Read the entry in the metadata that `hub_card` wrote.

    A card is unverified: `Store.get` verifies the files when they are pulled.

    Returns:
        The entry, or None if the card has none or it cannot be read.
    """
    metadata = card.to_dict() if hasattr(card, "to_dict") else card
    metadata = metadata if isinstance(metadata, Mapping) else {}
    section = metadata.get("adapterhub")
    if not isinstance(section, Mapping) or not {"version", "digest", "methods"} <= section.keys():
        return None
    base_model = metadata.get("base_model")
    fields = {
        **({"backbone": base_model} if isinstance(base_model, str) and base_model else {}),
        **{key: section[key] for key in _FIELDS if section.get(key) not in (None, "")},
    }
    if any(_SECTION[key](key, value) for key, value in fields.items()):
        return None
    return Entry(
        **{
            "task": None,
            "fingerprint": "",
            "backbone": "",
            **fields,
            "reference": f"{prefix}{name}@{fields['version']}",
            "name": name,
            **{key: tuple(fields.get(key, ())) for key in _LISTS},
            "metrics": {key: float(value) for key, value in fields.get("metrics", {}).items()},
        }
    )


def _results(entry: Entry) -> list[EvalResult]:
    return [
        EvalResult(
            task_type=entry.task or "other",
            dataset_type="evaluation data",
            dataset_name="evaluation data of the recipe",
            metric_type=name,
            metric_value=value,
        )
        for name, value in sorted(entry.metrics.items())
    ]


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


@contextmanager
def _without_words_on_xet() -> Iterator[None]:
    """Keep the client from warning that open files do not go to Xet."""

    def says_more(record: logging.LogRecord) -> bool:
        return "Xet" not in record.getMessage()

    logger = logging.getLogger("huggingface_hub._commit_api")
    logger.addFilter(says_more)
    try:
        yield
    finally:
        logger.removeFilter(says_more)

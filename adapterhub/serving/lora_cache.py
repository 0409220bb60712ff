"""A cache of adapters as LoRAs, each converted once, for the vLLM plugin."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterhub.adapters.compatibility import check_backbone_files
from adapterhub.config.user_folders import KeyedFiles, user_folder
from adapterhub.errors import MismatchError
from adapterhub.files.atomic import explained, file_digest
from adapterhub.files.schema import canonical_json
from adapterhub.interchange.peft.files import read_config
from adapterhub.merging.vllm import in_vllm
from adapterhub.registry.pull import Fetched, pull_verified
from adapterhub.registry.store import Reference, parse_reference
from adapterhub.serving.http.access import AllowedAdapters

_MOST_BYTES = 64 << 30  # of all LoRAs in the cache: vLLM reads a LoRA again after evicting it
_LORA, _RECORD = "lora", "record.json"
_FORM = "vllm-1"  # the format of cache entries


@dataclass(frozen=True)
class ConvertedAdapter:
    """A LoRA that vLLM can read.

    Attributes:
        reference: the adapter, with its version.
        digest: the sha256 of its manifest.
        folder: the folder of the LoRA.
        notes: losses of the conversion, and notes for the operator of the server.
    """

    reference: Reference
    digest: str
    folder: Path
    notes: tuple[str, ...]

    @property
    def stacked(self) -> bool:
        """Whether it updates stacked expert weights."""
        return bool(read_config(self.folder)["target_parameters"])


class ConvertedAdapters:
    """Resolves adapters by reference, and converts each once, however many requests there are.

    A name keeps its first meaning for the lifetime of this object.

    Args:
        allow: patterns of the references that may be requested.
        max_rank: the server's largest rank.
        max_lost: the largest share of an update that a conversion may lose.
        registry: the registry, if not the user's own.
    """

    def __init__(
        self,
        allow: Sequence[str],
        max_rank: int,
        max_lost: float,
        registry: str | Path | None = None,
    ) -> None:
        self.allowed = AllowedAdapters({}, tuple(allow))
        self.max_rank, self.max_lost, self.registry = max_rank, max_lost, registry
        self._found: dict[str, ConvertedAdapter] = {}
        self._converting = threading.Lock()

    def find(self, base: str, name: str) -> ConvertedAdapter:
        """Return the LoRA of an adapter, after pulling, verifying and converting it if necessary.

        Args:
            base: the folder or Hub id of the backbone that is served.
            name: a client's reference.

        Raises:
            UnknownAdapterError: it must not be requested.
            RegistryError: the reference cannot be resolved.
            SignatureError: a required signature by a trusted key is missing.
            FileError: its files are broken.
            MismatchError: it is for another backbone, or vLLM cannot serve it.
            BackboneError: the backbone cannot be read.
            OutputError: the cache cannot be written.
        """
        self.allowed.find(name)
        earlier = self._found.get(name)
        if earlier is not None and is_unchanged(earlier.folder.parent):
            return earlier
        # A parsed reference ignores a folder of the same name in the working directory.
        reference = earlier.reference if earlier else parse_reference(name)
        fetched = pull_verified(reference, registry=self.registry)
        if fetched.digest is None:
            raise MismatchError(
                f"{name} is another library's adapter, whose backbone cannot be verified by its "
                "weights",
                hint=f"adapterhub import {name}, and publish the result",
            )
        if earlier is not None and earlier.digest != fetched.digest:
            raise MismatchError(f"{earlier.reference} is another adapter than before")
        converted = self._cached(base, fetched, fetched.digest)
        if converted is None:
            with self._converting:  # one at a time: each may need the weights of the backbone
                converted = self._cached(base, fetched, fetched.digest)
                converted = converted or self._converted(base, fetched, fetched.digest)
        self._found[name] = converted
        return converted

    def _cached(self, base: str, fetched: Fetched, digest: str) -> ConvertedAdapter | None:
        path = self._files().find(self._key(digest))
        if path is None:
            return None
        if not is_unchanged(path):
            shutil.rmtree(path, ignore_errors=True)
            return None
        check_backbone_files(fetched.own().manifest, base)
        return _read(path, fetched, digest)

    def _converted(self, base: str, fetched: Fetched, digest: str) -> ConvertedAdapter:
        files = self._files()
        with explained(files.folder):
            path = files.make_folder(
                self._key(digest), lambda draft: self._write(draft, base, fetched)
            )
        return _read(path, fetched, digest)

    def _files(self) -> KeyedFiles:
        return KeyedFiles(user_folder("cache") / "vllm", _FORM, _MOST_BYTES)

    def _key(self, digest: str) -> list[Any]:
        return [digest, self.max_rank, self.max_lost]

    def _write(self, draft: Path, base: str, fetched: Fetched) -> None:
        export = in_vllm(
            fetched.own(),
            backbone=base,
            max_rank=self.max_rank,
            max_lost=self.max_lost,
        )
        draft.mkdir()
        export.write(draft / _LORA)
        digests = {each.name: file_digest(each).sha256 for each in (draft / _LORA).iterdir()}
        (draft / _RECORD).write_bytes(canonical_json({"files": digests, "notes": export.notes}))


def _read(folder: Path, fetched: Fetched, digest: str) -> ConvertedAdapter:
    assert fetched.reference is not None
    notes = _record(folder)["notes"]
    return ConvertedAdapter(fetched.reference, digest, folder / _LORA, tuple(notes))


def is_unchanged(folder: Path) -> bool:
    """Return whether the files of a LoRA in the cache are unchanged since they were written."""
    try:
        files = _record(folder)["files"]
        return bool(files) and all(
            file_digest(folder / _LORA / name).sha256 == digest for name, digest in files.items()
        )
    except (OSError, ValueError, KeyError):
        return False


def _record(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / _RECORD).read_bytes())
    return record

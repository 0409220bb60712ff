"""Adapters of peft and of the adapters library in a store: files to copy, and entries.

They lack a manifest and so a fingerprint; the digest of an entry only identifies the version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

from adapterhub.errors import FileError
from adapterhub.files import schema
from adapterhub.interchange.adapters_library import files as adapters
from adapterhub.interchange.peft import files as peft
from adapterhub.registry.store import Entry
from adapterhub.registry.version_files import copy_files

CONFIG_FILE = peft.CONFIG_FILE  # the adapters library uses the same name
_TENSOR_FILES = (peft.TENSORS_FILE, adapters.WEIGHTS[0])
FOREIGN = (CONFIG_FILE, *_TENSOR_FILES, adapters.HEAD_CONFIG_FILE, adapters.HEAD_WEIGHTS[0])
# Copied on request only; they are opened with torch.load(weights_only=True).
PICKLES = (peft.PICKLE_FILE, adapters.WEIGHTS[1], adapters.HEAD_WEIGHTS[1])
MAX_CONFIG_BYTES = 4 << 20


def entry_of_foreign(data: bytes, *, reference: str, name: str, version: str) -> Entry:
    """Build the entry of another library's adapter from its configuration.

    Raises:
        FileError: the configuration cannot be read.
    """
    config, problems = schema.parse_object(data, MAX_CONFIG_BYTES)
    if problems:
        raise FileError(f"{CONFIG_FILE} of {reference} cannot be read", offenders=problems)
    inner = config.get("config")
    architecture = inner.get("architecture") if isinstance(inner, dict) else None
    method = config.get("peft_type") or architecture or "bottleneck"
    backbone = config.get("base_model_name_or_path") or config.get("model_name") or ""
    return Entry(
        reference=reference,
        name=name,
        version=version,
        digest=foreign_digest(name, version),
        backbone=str(backbone),
        fingerprint="",
        methods=(str(method).lower(),),
        task=None,
    )


def foreign_digest(name: str, version: str) -> str:
    """Return the digest of the name and version of another library's adapter, not of its files."""
    return hashlib.sha256(f"{name}@{version}".encode()).hexdigest()


def files_to_copy(
    available: Collection[str], source: str, *, allow_pickle: bool = False
) -> tuple[str, ...]:
    """Return the available files that the importer reads.

    Raises:
        FileError: there is no safetensors file, and no pickle that `allow_pickle` permits.
    """
    if any(name in available for name in _TENSOR_FILES):
        return tuple(name for name in FOREIGN if name in available)
    if allow_pickle and any(name in available for name in PICKLES):
        return tuple(name for name in (*FOREIGN, *PICKLES) if name in available)
    raise FileError(
        f"{source} has an adapter's configuration but no safetensors file",
        expected=" or ".join(_TENSOR_FILES),
        hint="--allow-pickle (allow_pickle=True) reads a pickle instead, without running its code",
    )


def copy_foreign(source: Path, folder: Path, *, allow_pickle: bool = False) -> Path:
    """Copy the files of another library's adapter that the importer reads to a new folder.

    Raises:
        FileError: there is no safetensors file, and no pickle that `allow_pickle` permits.
    """
    available = {path.name for path in source.iterdir() if path.is_file()}
    names = files_to_copy(available, source.name, allow_pickle=allow_pickle)
    return copy_files(source, folder, names)

"""Repositories of peft and adapters: what is taken from them, and what a search shows.

They have no manifest: no fingerprint, and no digest but that of the files themselves.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from adapterhub.errors import FileError
from adapterhub.files import schema
from adapterhub.interchange.adapters_library import files as adapters
from adapterhub.interchange.peft import files as peft
from adapterhub.registry.local_versions import copy_files
from adapterhub.registry.store import Entry

CONFIG_FILE = peft.CONFIG_FILE  # that of adapters is called so too
_NUMBERS = (peft.TENSORS_FILE, adapters.WEIGHTS[0])
FOREIGN = (CONFIG_FILE, *_NUMBERS, adapters.HEAD_CONFIG_FILE, adapters.HEAD_WEIGHTS[0])
# Only when asked for; they are opened by torch's weights_only loader.
PICKLES = (peft.PICKLE_FILE, adapters.WEIGHTS[1], adapters.HEAD_WEIGHTS[1])
_MAX_CONFIG = 4 << 20


def entry_of_foreign(data: bytes, *, reference: str, name: str, version: str) -> Entry:
    """What a search shows of another library's adapter, by the bytes of its configuration.

    Raises:
        FileError: they cannot be read.
    """
    config, problems = schema.parse_object(data, _MAX_CONFIG)
    if problems:
        raise FileError(f"{reference}: {CONFIG_FILE} cannot be read", offenders=problems)
    method = config.get("peft_type") or config.get("config", {}).get("architecture") or "bottleneck"
    backbone = config.get("base_model_name_or_path") or config.get("model_name") or ""
    return Entry(
        reference=reference,
        name=name,
        version=version,
        digest=hashlib.sha256(f"{name}@{version}".encode()).hexdigest(),
        backbone=str(backbone),
        fingerprint="",
        methods=(str(method).lower(),),
        task=None,
    )


def copy_foreign(source: Path, folder: Path, *, allow_pickle: bool = False) -> Path:
    """Copy what is read of another library's adapter to a new folder.

    Raises:
        FileError: its numbers are not there, or in a pickle that was not asked for.
    """
    if any((source / name).is_file() for name in _NUMBERS):
        return copy_files(source, folder, FOREIGN)
    if allow_pickle and any((source / name).is_file() for name in PICKLES):
        return copy_files(source, folder, (*FOREIGN, *PICKLES))
    raise FileError(
        f"{source.name} has an adapter's configuration, and no safetensors with its numbers",
        expected=" or ".join(_NUMBERS),
        hint="--allow-pickle (allow_pickle=True) takes its pickle, and runs no code of it",
    )

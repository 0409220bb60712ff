"""The checkpoint formats of other libraries, detected by their files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adapterhub.files.native import MANIFEST_FILE
from adapterhub.interchange.adapters_library.files import is_adapters
from adapterhub.interchange.adapters_library.importer import (
    adapters_checkpoint_info,
    import_adapters,
)
from adapterhub.interchange.diffusers_lora import diffusers_checkpoint_info, import_diffusers
from adapterhub.interchange.peft.files import is_peft
from adapterhub.interchange.peft.importer import import_peft, peft_checkpoint_info
from adapterhub.interchange.pipeline_files import is_diffusers
from adapterhub.interchange.translation import CheckpointInfo, ImportedAdapter


@dataclass(frozen=True)
class Format:
    """A checkpoint format: detection, reader, and records for loading a backbone.

    The reader takes the folder, the anatomy of a backbone, `allow_pickle`, and `head`: false omits
    the task head.
    """

    name: str
    detect: Callable[[Path], bool]
    read: Callable[..., ImportedAdapter]
    checkpoint_info: Callable[[Path], CheckpointInfo]


# Both have an adapter_config.json, so the format with the stricter detection comes first.
FORMATS = (
    Format("adapters", is_adapters, import_adapters, adapters_checkpoint_info),
    Format("peft", is_peft, import_peft, peft_checkpoint_info),
    Format("diffusers", is_diffusers, import_diffusers, diffusers_checkpoint_info),
)


def detect(folder: Path) -> Format | None:
    """Return the other library's format of a folder; None for native or unknown formats."""
    if (folder / MANIFEST_FILE).exists():
        return None
    return next((f for f in FORMATS if f.detect(folder)), None)

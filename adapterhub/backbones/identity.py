"""The name of a loaded backbone, and the folder it was loaded from."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel

from adapterhub.backbones.find import is_hub_id

ORIGIN = "_adapterhub_origin"  # the attribute of a model with the folder it was loaded from
_CACHED = re.compile(r"/models--([^/]+)/snapshots/([0-9a-f]{40})/?$")


def name_and_revision(model: PreTrainedModel) -> tuple[str, str | None]:
    """Return the name of a model's backbone that is valid on any machine, and its commit.

    That is a Hub id unchanged, the Hub id of a folder in the Hub's cache, or the last component of
    any other folder.
    """
    name = str(model.config._name_or_path or f"unnamed-{model.config.model_type}")
    if cached := _CACHED.search(name.replace("\\", "/")):
        return cached[1].replace("--", "/"), cached[2]
    revision: str | None = getattr(model.config, "_commit_hash", None)
    if not Path(name).is_dir() and is_hub_id(name):
        return name, revision
    last = Path(name.replace("\\", "/")).expanduser().resolve().name
    plain = re.sub(r"[^A-Za-z0-9_.-]+|\.\.+", "-", last).strip("-.")
    return plain or f"unnamed-{model.config.model_type}", revision


def origin_of(model: PreTrainedModel) -> Path | None:
    """Return the folder a model was loaded from, if it still exists; makes no network requests."""
    name = str(model.config._name_or_path)
    for folder in (getattr(model, ORIGIN, ""), name):
        if folder and Path(folder).is_dir():
            return Path(folder)
    if not is_hub_id(name):
        return None
    commit = getattr(model.config, "_commit_hash", None)
    cached = try_to_load_from_cache(name, "config.json", revision=commit)
    return Path(cached).parent if isinstance(cached, str) else None

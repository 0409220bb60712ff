"""The name of a loaded backbone, and the folder it was loaded from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel

from adapterhub.backbones.find import is_hub_id, is_local_name
from adapterhub.backbones.local_folders import remember_folder
from adapterhub.config.user_folders import expanded, is_folder
from adapterhub.errors import BackboneError

ORIGIN = "_adapterhub_origin"  # the attribute of a model with the folder it was loaded from
NO_WEIGHTS = "--no-weights"
_CACHED = re.compile(r"/models--([^/]+)/snapshots/([0-9a-f]{40})/?$")


def name_and_revision(
    model: PreTrainedModel, fingerprint: Callable[[], str]
) -> tuple[str, str | None]:
    """Return the name of a model's backbone that is valid on any machine, and its commit.

    That is a Hub id unchanged, the Hub id of a folder in the Hub's cache, or a local name: the last
    component of any other folder and the start of the fingerprint, as in `bert--0123456789ab`. Hub
    ids cannot contain `--`, and other weights in a folder of the same name have another name.
    The names in a folder's own config.json are not used: they are often those of its parent model.
    """
    name = str(model.config._name_or_path or "")
    if cached := _CACHED.search(name.replace("\\", "/")):
        return cached[1].replace("--", "/"), cached[2]
    revision: str | None = getattr(model.config, "_commit_hash", None)
    if not is_folder(name) and is_hub_id(name):
        return name, revision
    last = expanded(name.replace("\\", "/")).resolve().name if name else ""
    plain = re.sub(r"[^A-Za-z0-9_.-]+|\.\.+", "-", last).strip("-.")[:100]
    return local_name(plain or f"unnamed-{model.config.model_type}", fingerprint), revision


def local_name(name: str, fingerprint: Callable[[], str]) -> str:
    """Return the name of a backbone that is not on the Hub."""
    try:
        return f"{name}--{fingerprint().rpartition('-')[2][:12]}"
    except BackboneError:  # it has no weights
        return f"{name}{NO_WEIGHTS}"


def remember_backbone(model: PreTrainedModel, name: str) -> None:
    """Record the folder that a model was loaded from, for adapters that name it `name`."""
    folder = origin_of(model) if is_local_name(name) and not name.endswith(NO_WEIGHTS) else None
    if folder is not None:
        remember_folder(name, folder)


def origin_of(model: PreTrainedModel) -> Path | None:
    """Return the folder a model was loaded from, if it still exists; makes no network requests."""
    name = str(model.config._name_or_path)
    for folder in (getattr(model, ORIGIN, ""), name):
        if folder and is_folder(folder):
            return Path(folder)
    if not is_hub_id(name):
        return None
    commit = getattr(model.config, "_commit_hash", None)
    cached = try_to_load_from_cache(name, "config.json", revision=commit)
    return Path(cached).parent if isinstance(cached, str) else None

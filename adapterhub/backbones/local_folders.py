"""A record of the folders of backbones that are not on the Hub, by name.

    backbones/HASH.json    {"folder": "/home/me/my-bert", "name": "my-bert--0123456789ab"}

A name includes the start of the fingerprint, so other weights have another name. A folder is
recorded when an adapter is saved on its backbone, or was verified to belong to it. It is used if
the name is not found elsewhere, and weights loaded from it are verified as always. Each name has
one small file in the user's state folder. The file is never published, can be deleted at any time,
and is ignored if damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from adapterhub.config.user_folders import NO_WEIGHTS, is_folder, is_local_name, state_folder

if TYPE_CHECKING:
    from adapterhub.anatomy.backbone import Backbone

MOST_FOLDERS = 1_024  # the oldest are removed first
_MAX_BYTES = 64 << 10


def remember_folder(name: str, folder: Path) -> None:
    """Record the folder of a local backbone; do nothing if it cannot be written.

    Only a new or changed folder is written.
    """
    place = str(folder.absolute())
    if recorded_folder(name) == place:
        return
    path = _path(name)
    data = json.dumps({"folder": place, "name": name}, indent=2, sort_keys=True)
    staged = path.with_name(f".{secrets.token_hex(8)}.new")
    with contextlib.suppress(OSError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            staged.write_text(f"{data}\n", encoding="utf-8")
            staged.replace(path)
        finally:
            staged.unlink(missing_ok=True)
        _forget_oldest(path.parent)


def remember_backbone(backbone: Backbone, name: str) -> None:
    """Record the folder that a backbone was loaded from, under the `name` used by adapters."""
    folder = backbone.origin if is_local_name(name) and not name.endswith(NO_WEIGHTS) else None
    if folder is not None:
        remember_folder(name, folder)


def recorded_folder(name: str) -> str | None:
    """Return the recorded folder of a local backbone, even if it no longer exists."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        with os.fdopen(os.open(_path(name), flags), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            tree = json.loads(file.read(_MAX_BYTES + 1))
        folder = tree["folder"] if tree["name"] == name else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return folder if isinstance(folder, str) and os.path.isabs(folder) else None


def package_folder(package: str) -> Path | None:
    """Return the folder of an installed package without importing it; None if missing."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def remembered_folders() -> list[str]:
    """List the recorded folders that exist, newest first."""
    files = state_folder().joinpath("backbones").glob("*.json")
    found = []
    for file in sorted(files, key=lambda each: each.stat().st_mtime_ns, reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            name = json.loads(file.read_bytes()[:_MAX_BYTES])["name"]
            found.append(recorded_folder(name))
    return [folder for folder in dict.fromkeys(found) if folder and is_folder(folder)]


def _path(name: str) -> Path:
    key = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return state_folder() / "backbones" / f"{key}.json"


def _forget_oldest(folder: Path) -> None:
    with os.scandir(folder) as entries:
        files = [(e.stat().st_mtime_ns, e.path) for e in entries if e.name.endswith(".json")]
    for _, path in sorted(files)[: max(len(files) - MOST_FOLDERS, 0)]:
        with contextlib.suppress(OSError):
            os.unlink(path)

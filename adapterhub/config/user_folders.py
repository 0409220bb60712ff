"""The folders of a user: cache, configuration, data, and state, which is neither of them."""

from __future__ import annotations

import functools
import os
import stat
import tempfile
from pathlib import Path
from typing import Literal

import platformdirs

from adapterhub.errors import ConfigError, warn_user

STATE_VARIABLE = "ADAPTERHUB_STATE"
Kind = Literal["cache", "config", "data", "state"]


def user_folder(kind: Kind) -> Path:
    """Return the user's folder for files of a kind, or a temporary one for a user without a home.

    Raises:
        ConfigError: there is neither.
    """
    try:
        folder: Path = getattr(platformdirs, f"user_{kind}_path")("adapterhub", appauthor=False)
    except RuntimeError:  # by newer releases of platformdirs
        return _temporary_home() / kind
    return folder if folder.is_absolute() else _temporary_home() / kind


def state_folder() -> Path:
    """Return `$ADAPTERHUB_STATE`, or else the user's state folder."""
    folder = os.environ.get(STATE_VARIABLE)
    return Path(folder) if folder else user_folder("state")


def expanded(path: str | Path) -> Path:
    """Return a path with the home folder for `~`; as it is where that user has none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


@functools.cache
def _temporary_home() -> Path:
    """Return a folder that no other user can write to, for a user of a container without a home."""
    hint = "set HOME to a folder"
    try:
        user = os.getuid() if hasattr(os, "getuid") else os.getlogin()
        folder = Path(tempfile.gettempdir()) / f"adapterhub-{user}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"this user has no home folder: {error}", hint=hint) from error
    own = hasattr(os, "getuid") and found.st_uid == os.getuid() and not found.st_mode & 0o077
    if not stat.S_ISDIR(found.st_mode) or (not own and os.name != "nt"):
        raise ConfigError(
            f"this user has no home folder, and others may write to {folder}", hint=hint
        )
    warn_user(
        f"this user has no home folder: {folder} has the cache, trusted keys and registry, and "
        "may be deleted at any time; to keep them, set HOME",
        stacklevel=2,
    )
    return folder

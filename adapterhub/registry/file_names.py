"""Names of folders in a local registry, valid and distinct on every file system.

A backbone's folder is its id with `/` written `--`, which Hub ids cannot contain. Names of local
backbones end in `--` and the start of their fingerprint, and are their own folder. An id that would
share its folder with another one is refused.
"""

from __future__ import annotations

import re

from adapterhub.errors import RegistryError

_DEVICES = {
    "con",
    "prn",
    "aux",
    "nul",
    *(f"{port}{n}" for port in ("com", "lpt") for n in range(10)),
}
_LOCAL_BACKBONE = re.compile(r".+--(?:[0-9a-f]{12}|no-weights)")
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


def unportable(name: str) -> str:
    """Return why a name cannot be a file's or folder's on every system, or "" if it can."""
    stem = name.partition(".")[0]
    if stem.casefold() in _DEVICES:
        return f"Windows reserves {stem!r} for a device"
    return "Windows drops a dot or space at the end" if name.endswith((".", " ")) else ""


def backbone_folder(backbone: str) -> str:
    """Return the name of the folder for a backbone's adapters; no two backbones share one.

    Raises:
        RegistryError: another backbone would have the same folder, or the name is not portable.
    """
    folder = folder_of_id(backbone)
    problem = unportable(folder)
    is_local = "/" not in backbone and "--" in backbone
    if "/" in backbone and "--" in backbone:
        problem = "an id of the Hub does not contain '--'"
    elif is_local != bool(_LOCAL_BACKBONE.fullmatch(folder)):
        other = folder.replace("--", "/", 1) if is_local else folder
        problem = f"they would share the folder {folder!r} with those of {other!r}"
    if problem:
        raise RegistryError(
            f"adapters of the backbone {backbone!r} cannot be published: {problem}",
            expected="an id of the Hub, or a local name as `adapterhub` saves it",
            hint="load the backbone from the Hub, or from a folder with another name, and save the"
            " adapter again",
        )
    return folder


def folder_of_id(backbone: str) -> str:
    """Return the folder in which a backbone's id was stored, even if another one may share it."""
    return backbone.replace("/", "--")


def is_backbone_folder(name: str) -> bool:
    """Return whether a folder's name can be that of a backbone."""
    return ".." not in name and _FOLDER.fullmatch(name) is not None

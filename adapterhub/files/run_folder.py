"""The output folder of a training run: files next to the adapter, or instead of it."""

from __future__ import annotations

import os
from pathlib import Path

from adapterhub.config.user_folders import is_folder
from adapterhub.config.yaml import load_yaml
from adapterhub.errors import FileError
from adapterhub.files.manifest import Manifest

RECIPE_FILE = "recipe.yaml"
CHECKPOINTS = "checkpoints"
_MOST_LISTED = 8  # names listed in the description of a folder


def no_adapter(folder: Path) -> FileError:
    """Build the error for a folder without an adapter, listing its contents."""
    expected = "the folder of an adapter, or the output folder of a finished run"
    if not is_folder(folder):
        exists = os.path.lexists(folder)
        problem = f"{folder} is not a folder" if exists else f"no such folder: {str(folder)!r}"
        return FileError(problem, expected=expected, hint="adapterhub list")
    names = names_in(folder)
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    is_run = (folder / RECIPE_FILE).is_file()
    if is_run and (checkpoint := _checkpoint_in(folder)):
        return FileError(
            f"the run in {folder} is not finished: it has no adapter yet",
            expected=f"{expected}, or a checkpoint",
            hint=f"{checkpoint} in place of {folder}; or adapterhub train {folder / RECIPE_FILE} "
            "--resume",
        )
    return FileError(
        f"the folder {folder} has no adapter",
        expected=expected,
        offenders=[f"in it: {', '.join(names[:_MOST_LISTED]) + more or 'nothing'}"],
        hint=f"adapterhub train {folder / RECIPE_FILE} --resume, if the run was stopped"
        if is_run
        else "",
    )


def _checkpoint_in(folder: Path) -> Path | None:
    """Return the best checkpoint of a run, or the last one, if it is the folder of an adapter."""
    places = (folder / CHECKPOINTS / name for name in ("best", "last"))
    return next((p for p in places if (p / "adapter" / "adapter.json").is_file()), None)


def names_in(folder: Path) -> list[str]:
    """List a folder without its hidden entries; folders end with a slash."""
    try:
        with os.scandir(folder) as entries:
            names = [e.name + "/" * e.is_dir() for e in entries if not e.name.startswith(".")]
    except OSError:
        return []
    return sorted(names)


def backbone_of_adapter(
    files: Path, manifest: Manifest, backbone: str | None = None
) -> tuple[str, str | None]:
    """Return the folder or Hub id of an adapter's backbone, and its revision.

    In this order: the user's choice, the recorded folder of a local backbone, the backbone in the
    recipe of the adapter's run, or the id in the manifest, at its commit. Folders that do not exist
    on this machine are skipped.

    `backbone` is the user's choice, if any.
    """
    if location := backbone or _recorded(manifest) or backbone_of_run(files):
        return location, None
    return manifest.backbone.id, manifest.backbone.revision


def _recorded(manifest: Manifest) -> str | None:
    from adapterhub.backbones.find import recorded_folder  # its room imports torch

    # Before the recipe: a relative path there may be another folder in this working directory.
    folder = recorded_folder(manifest.backbone.id)
    return folder if folder and is_folder(folder) else None


def backbone_of_run(files: Path) -> str | None:
    """Return the backbone named in the recipe next to an adapter, if it is a local folder.

    The recipe is usually the user's own file. An untrusted one could at most select a local folder
    to read as data: checkpoints run no code, and the fingerprint check still applies. Network paths
    are not opened, because opening one already contacts a server.
    """
    run = files.parent
    if run.parent.name == CHECKPOINTS:  # the adapter of a checkpoint
        run = run.parent.parent
    recipe = run / RECIPE_FILE
    if not recipe.is_file() or recipe.is_symlink():
        return None
    backbone = str(load_yaml(recipe).get("backbone", ""))
    is_remote = backbone.startswith(("\\\\", "//")) or "\0" in backbone
    return backbone if backbone and not is_remote and is_folder(backbone) else None

"""Files next to an adapter in the output folder of its training run."""

from __future__ import annotations

from pathlib import Path

from adapterhub.config.yaml import load_yaml
from adapterhub.files.manifest import Manifest


def backbone_of_adapter(
    files: Path, manifest: Manifest, backbone: str | None = None
) -> tuple[str, str | None]:
    """Return the folder or Hub id of an adapter's backbone, and its revision.

    The user's choice, otherwise the backbone of the run that made the adapter if it is on this
    machine, otherwise the backbone of the manifest at its commit.

    Args:
        files: the adapter's folder.
        manifest: its manifest.
        backbone: the user's choice, if any.
    """
    if location := backbone or backbone_of_run(files):
        return location, None
    return manifest.backbone.id, manifest.backbone.revision


def backbone_of_run(files: Path) -> str | None:
    """Return the backbone named in the recipe next to an adapter, if it is a local folder.

    The recipe is usually the user's own file. An untrusted one could at most select a local folder
    to read as data: checkpoints run no code, and the fingerprint check still applies. Network paths
    are not opened, because opening one already contacts a server.
    """
    recipe = files.parent / "recipe.yaml"
    if not recipe.is_file() or recipe.is_symlink():
        return None
    backbone = str(load_yaml(recipe).get("backbone", ""))
    is_remote = backbone.startswith(("\\\\", "//")) or "\0" in backbone
    return backbone if backbone and not is_remote and Path(backbone).is_dir() else None

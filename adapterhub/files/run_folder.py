"""What lies beside an adapter in the folder of its run."""

from __future__ import annotations

from pathlib import Path

from adapterhub.config.yaml import load_yaml
from adapterhub.files.manifest import Manifest


def backbone_of_run(files: Path) -> str | None:
    """The backbone of the recipe beside an adapter, if that is a folder on this machine.

    A recipe is its user's own file. Were it a stranger's, it could choose among the folders of this
    machine, to be read as data: checkpoints run no code, and the fingerprint decides. A network
    path is not even looked at, since that alone tells a server who looks.
    """
    recipe = files.parent / "recipe.yaml"
    if not recipe.is_file() or recipe.is_symlink():
        return None
    backbone = str(load_yaml(recipe).get("backbone", ""))
    elsewhere = backbone.startswith(("\\\\", "//")) or "\0" in backbone
    return backbone if not elsewhere and Path(backbone).is_dir() else None


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
    if place := backbone or backbone_of_run(files):
        return place, None
    return manifest.backbone.id, manifest.backbone.revision

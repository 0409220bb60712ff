"""What lies beside an adapter in the folder of its run."""

from __future__ import annotations

from pathlib import Path

from adapterhub.config.yaml import load_yaml


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

"""`adapterhub import`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click

from adapterhub.cli._format import say, say_text
from adapterhub.cli._options import backbone_place_option, kind_option, revision_option
from adapterhub.config.user_folders import is_folder, is_there
from adapterhub.errors import ConfigError, FileError
from adapterhub.status import doing

if TYPE_CHECKING:
    from adapterhub.interchange.translation import CheckpointInfo


@click.command("import")
@click.argument("folder", metavar="FOLDER")
@backbone_place_option
@revision_option
@click.option("--output", required=True, help="Folder for the imported adapter.")
@kind_option
@click.option("--labels", help="Class names a,b,c in the order of the outputs.")
@click.option("--name", help="Name of the imported adapter.")
@click.option("--any-backbone", is_flag=True, help="Accept a backbone with another name.")
@click.option("--allow-pickle", is_flag=True, help="Read pickled tensors; no code is run.")
@click.option("--overwrite", is_flag=True, help="Replace the adapter in the output folder.")
def command(
    folder: str,
    backbone: str | None,
    revision: str | None,
    output: str,
    task: str | None,
    labels: str | None,
    name: str | None,
    any_backbone: bool,
    allow_pickle: bool,
    overwrite: bool,
) -> None:
    """Import an adapter that peft, adapters (AdapterHub), diffusers or kohya saved in FOLDER.

    The adapter is loaded into its backbone, checked and saved in this library's format.
    """
    with doing("loading torch"):
        form, checkpoint_info = _recognized(Path(folder))
    source = backbone or checkpoint_info.backbone
    if not source:
        raise ConfigError(f"{folder} does not name its backbone", hint="--backbone ID")
    class_names = (
        tuple(label.strip() for label in labels.split(",")) if labels else checkpoint_info.labels
    )
    kind, names = _head(task or checkpoint_info.task, checkpoint_info.outputs, class_names)
    commit = revision or (checkpoint_info.revision if backbone is None else None)
    from adapterhub.adapters.load import load_folder
    from adapterhub.backbones.load import load_backbone

    with doing(f"loading {source}"):
        model, _ = load_backbone(source, task=kind, labels=names, revision=commit)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapter = load_folder(
            model, folder, name=name, any_backbone=any_backbone, allow_pickle=allow_pickle
        )
    _check_labels(class_names, adapter.labels)
    adapter.save(output, overwrite=overwrite)
    for note in caught:
        say_text(f"note: {note.message}", err=True)
    methods = ", ".join(method.name for method in adapter.methods)
    say(f"{output}: {methods}, {adapter.count():,} parameters, imported from {form}")
    if adapter.labels:
        say(f"labels: {', '.join(adapter.labels)}")


def _recognized(folder: Path) -> tuple[str, CheckpointInfo]:
    """Return the name of a folder's format and the metadata of its checkpoint."""
    if not is_folder(folder):
        raise FileError(
            f"{folder} is a file" if is_there(folder) else f"no such folder: {str(folder)!r}",
            expected="the folder of a checkpoint of peft or adapters",
        )
    from adapterhub.interchange.formats import FORMATS, detect

    form = detect(folder)
    if form is None:
        raise FileError(
            f"{folder} contains no adapter in a known format",
            expected=f"a checkpoint of {' or '.join(f.name for f in FORMATS)}",
        )
    return form.name, form.checkpoint_info(folder)


def _check_labels(labels: tuple[str, ...], imported: tuple[str, ...]) -> None:
    if labels and labels != imported:
        raise ConfigError(
            f"{len(labels)} labels for {len(imported)} outputs",
            expected=f"as many as {', '.join(imported) or 'none'}",
        )


def _head(task: str | None, outputs: int, labels: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the kind of model to load and its labels."""
    from adapterhub.backbones.task_models import TASK_MODELS

    kind = task or "features"
    row = TASK_MODELS.get(kind)
    if row is None or not row.classes:
        return kind, ()
    if outputs == 1 and not labels:
        without_classes = (
            name for name, r in TASK_MODELS.items() if r.auto == row.auto and not r.classes
        )
        return next(without_classes, kind), ()
    return kind, labels or tuple(f"LABEL_{i}" for i in range(max(outputs, 2)))

"""`adapterhub import`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click

from adapterhub.errors import ConfigError, FileError

if TYPE_CHECKING:
    from adapterhub.interchange.imported_adapter import CheckpointInfo


@click.command("import")
@click.argument("folder", metavar="FOLDER")
@click.option("--backbone", help="A Hub id or a folder, if not the one that the files name.")
@click.option("--revision", help="Branch, tag or commit of a Hub backbone.")
@click.option("--output", required=True, help="Folder for the adapter in our format.")
@click.option("--task", help="The kind of model, if the files do not say it.")
@click.option("--labels", help="The names of the classes, a,b,c, in the order of the outputs.")
@click.option("--name", help="The adapter's name.")
@click.option("--any-backbone", is_flag=True, help="Take a backbone of another name.")
@click.option("--allow-pickle", is_flag=True, help="Open tensors in a pickle, without its code.")
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
    """Import the adapter in FOLDER, that another library wrote (peft), for its backbone.

    \b
    adapterhub import their-lora --backbone Qwen/Qwen3-0.6B --output my-lora
    """
    form, checkpoint_info = _recognized(Path(folder))
    source = backbone or checkpoint_info.backbone
    if not source:
        raise ConfigError("the files do not name their backbone", hint="--backbone ID")
    given = (
        tuple(label.strip() for label in labels.split(",")) if labels else checkpoint_info.labels
    )
    kind, names = _head(task or checkpoint_info.task, checkpoint_info.outputs, given)
    at = revision or (checkpoint_info.revision if backbone is None else None)
    from adapterhub.adapters.load import load_folder
    from adapterhub.backbones.load import load_backbone

    model, _ = load_backbone(source, task=kind, labels=names, revision=at)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapter = load_folder(
            model, folder, name=name, any_backbone=any_backbone, allow_pickle=allow_pickle
        )
    _check_labels(given, adapter.labels)
    adapter.save(output, overwrite=overwrite)
    for note in caught:
        click.echo(f"note: {note.message}", err=True)
    methods = ", ".join(method.name for method in adapter.methods)
    click.echo(f"{output}: {methods}, {adapter.count():,} parameters, from {form}")
    if adapter.labels:
        click.echo(f"labels: {', '.join(adapter.labels)}")


def _recognized(folder: Path) -> tuple[str, CheckpointInfo]:
    """The name of a folder's format, and what its files say of their backbone."""
    from adapterhub.interchange.formats import FORMATS, detect

    form = detect(folder)
    if form is None:
        raise FileError(
            f"{folder} holds no adapter of a known format",
            expected=f"a folder of {', '.join(f.name for f in FORMATS)}",
        )
    return form.name, form.checkpoint_info(folder)


def _check_labels(given: tuple[str, ...], found: tuple[str, ...]) -> None:
    if given and given != found:
        raise ConfigError(
            f"{len(given)} labels for {len(found)} outputs",
            expected=f"as many as {', '.join(found) or 'none'}",
        )


def _head(task: str | None, outputs: int, labels: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The kind of model to load, and its labels."""
    from adapterhub.backbones.load import TASK_MODELS

    kind = task or "features"
    row = TASK_MODELS.get(kind)
    if row is None or not row.classes:
        return kind, ()
    if outputs == 1 and not labels:
        one = [name for name, r in TASK_MODELS.items() if r.auto == row.auto and not r.classes]
        return (one or [kind])[0], ()
    return kind, labels or tuple(f"LABEL_{i}" for i in range(max(outputs, 2)))

"""`adapterhub export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from adapterhub.errors import ConfigError

if TYPE_CHECKING:
    from adapterhub.methods._spec import Spec


@click.command("export")
@click.argument("source", metavar="[ADAPTER | RECIPE.yaml]", required=False)
@click.option("--to", "form", default="peft", show_default=True, help="The format: peft.")
@click.option("--output", help="Folder for the exported adapter.")
@click.option("--overwrite", is_flag=True, help="Replace the export in the output folder.")
@click.option("--check", "target", help="Write nothing; say what keeps peft or vllm from it.")
@click.option("--method", help="With --check and no ADAPTER: a method spec.")
@click.option("--backbone", help="A Hub id or a folder, if not the one that ADAPTER names.")
@click.option("--task", help="The kind of model, such as causal-lm, if ADAPTER does not say it.")
@click.option("--max-lora-rank", type=int, default=16, show_default=True, help="vLLM's option.")
def command(
    source: str | None,
    form: str,
    output: str | None,
    overwrite: bool,
    target: str | None,
    method: str | None,
    backbone: str | None,
    task: str | None,
    max_lora_rank: int,
) -> None:
    """Write ADAPTER in the format of another library, or check before training whether it can be.

    \b
    adapterhub export runs/mine/adapter --output mine-peft
    adapterhub export --check vllm --method "lora(rank=64)" --backbone Qwen/Qwen3-0.6B

    A check needs no weights. Its exit code is 0 if nothing is in the way, else 1.
    """
    if target:
        _check(target, source, method, backbone, task, max_lora_rank)
    elif source and output:
        _export(source, form, output, overwrite, backbone, task)
    else:
        raise ConfigError(
            "there is nothing to export",
            expected="an adapter's folder and --output, or --check",
            hint="adapterhub export ADAPTER --output DIR",
        )


def _export(
    source: str, form: str, output: str, overwrite: bool, backbone: str | None, task: str | None
) -> None:
    from adapterhub.adapters.load import load_folder
    from adapterhub.backbones.load import load_backbone
    from adapterhub.files.native import read_manifest
    from adapterhub.files.run_folder import backbone_of_run
    from adapterhub.registry.pull import pull

    folder = pull(source)
    manifest = read_manifest(folder)
    model, _ = load_backbone(
        backbone or backbone_of_run(folder) or manifest.backbone.id,
        task=_kind(task or manifest.task),
        labels=manifest.labels,
        revision=None if backbone else manifest.backbone.revision,
    )
    load_folder(model, folder).export(output, format=form, overwrite=overwrite)
    click.echo(f"{output}: {manifest.name} in the format of {form}")


def _kind(task: object) -> str:
    """The kind of model of a task, or of a kind's own name."""
    from adapterhub.backbones.load import TASK_MODELS
    from adapterhub.tasks import parse_task

    if task is None:
        raise ConfigError(
            "the adapter does not say what kind of model it is for",
            expected=f"--task, one of {', '.join(TASK_MODELS)}",
            hint="--task causal-lm",
        )
    return str(task) if task in TASK_MODELS else parse_task(task).head


def _check(
    target: str,
    source: str | None,
    method: str | None,
    backbone: str | None,
    task: str | None,
    max_lora_rank: int,
) -> None:
    from adapterhub.adapters.export import blocking
    from adapterhub.backbones.load import TASK_MODELS, meta_model

    spec, place, kind, labels = _subject(source, method, backbone, task)
    names = labels or (("0", "1") if TASK_MODELS[kind].classes else ())
    found = blocking(
        meta_model(place, task=kind, labels=names), spec, target, max_rank=max_lora_rank
    )
    for line in found:
        click.echo(f"- {line}")
    click.echo(f"{target}: {f'{len(found)} in the way' if found else 'nothing in the way'}")
    sys.exit(1 if found else 0)


def _subject(
    source: str | None, method: str | None, backbone: str | None, task: str | None
) -> tuple[Spec, str, str, tuple[str, ...]]:
    """What is checked: a method, a backbone, the kind of model, and labels."""
    if source is None:
        if not method or not backbone:
            raise ConfigError(
                "there is nothing to check",
                expected="ADAPTER, RECIPE.yaml, or --method and --backbone",
            )
        return method, backbone, _kind(task or "causal-lm"), ()
    if Path(source).is_dir():
        from adapterhub.files.native import read_manifest
        from adapterhub.files.run_folder import backbone_of_run
        from adapterhub.registry.pull import pull

        folder = pull(source)
        manifest = read_manifest(folder)
        place = backbone or backbone_of_run(folder) or manifest.backbone.id
        return manifest.methods, place, _kind(task or manifest.task), manifest.labels
    from adapterhub.training.recipe import read

    recipe = read(source)
    spec: Spec = recipe.method  # type: ignore[assignment]
    return method or spec, backbone or recipe.backbone, _kind(task or recipe.task), ()

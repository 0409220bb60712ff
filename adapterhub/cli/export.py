"""`adapterhub export`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from adapterhub.cli._format import say
from adapterhub.cli._options import (
    backbone_place_option,
    head_option,
    kind_option,
    registry_option,
    require_signature_option,
)
from adapterhub.config.user_folders import is_file
from adapterhub.errors import ConfigError, unknown
from adapterhub.status import doing

if TYPE_CHECKING:
    from adapterhub.methods.common.base import Spec

_TARGETS = ("peft", "vllm")  # of --check


@click.command("export")
@click.argument("source", metavar="[ADAPTER | RECIPE.yaml]", required=False)
@click.option(
    "--to",
    "form",
    default="peft",
    show_default=True,
    help="Target format: peft, gguf, vllm, diffusers or kohya.",
)
@click.option("--output", help="Folder for the exported adapter; of gguf, the file.")
@click.option("--overwrite", is_flag=True, help="Replace the export in the output folder.")
@click.option("--check", "target", help="Only check whether peft or vllm can load it.")
@click.option("--method", help="Method spec to check, without ADAPTER.")
@backbone_place_option
@kind_option
@head_option
@registry_option
@require_signature_option
@click.option(
    "--max-lora-rank",
    type=int,
    default=16,
    show_default=True,
    help="Value of vLLM's --max-lora-rank.",
)
@click.option(
    "--max-lost",
    type=float,
    default=0.1,
    show_default=True,
    help="For vLLM: the share of an update that the conversion to LoRA may lose.",
)
def command(
    source: str | None,
    form: str,
    output: str | None,
    overwrite: bool,
    target: str | None,
    method: str | None,
    backbone: str | None,
    task: str | None,
    head: str | None,
    registry: str | None,
    max_lora_rank: int,
    max_lost: float,
) -> None:
    """Export an adapter to another library, or check that it can be exported.

    To vllm, DoRA and IA3 are converted to the closest LoRA of rank --max-lora-rank, and what it
    loses is printed; if that is more than --max-lost, nothing is written.

    --check writes nothing and loads no weights: it lists the obstacles to the export of ADAPTER, or
    of what RECIPE.yaml or --method would train. Where peft is installed, it also compares the
    outputs of the method and of its export, with random weights and parameters. Its exit code is 0
    if there are no problems, else 1.
    """
    if target:
        _check(target, source, method, backbone, task, max_lora_rank, registry)
    elif source and output and form == "vllm":
        _export_to_vllm(
            source, output, overwrite, backbone, head, registry, max_lora_rank, max_lost
        )
    elif source and output:
        _export(source, form, output, overwrite, backbone, task, head, registry)
    else:
        raise ConfigError(
            "nothing to export",
            expected="ADAPTER and --output, or --check",
            hint="adapterhub export ADAPTER --output DIR",
        )


def _export(
    source: str,
    form: str,
    output: str,
    overwrite: bool,
    backbone: str | None,
    task: str | None,
    head: str | None,
    registry: str | None,
) -> None:
    from adapterhub.backbones.torch_free_checks import check_backbone_options
    from adapterhub.files.manifest import with_head
    from adapterhub.files.run_folder import backbone_of_adapter
    from adapterhub.inference.record import training_record
    from adapterhub.registry.pull import pull_verified

    fetched = pull_verified(source, registry=registry)
    manifest = with_head(fetched.own().manifest, head)
    place, revision = backbone_of_adapter(fetched.folder, manifest, backbone)
    check_backbone_options(place)
    with doing("loading torch"):
        from adapterhub.adapters.load import load_folder
        from adapterhub.backbones.load import load_backbone

    kind = training_record(manifest, task).kind
    with doing(f"loading {place}"):
        model, _ = load_backbone(place, task=kind, labels=manifest.labels, revision=revision)
    chosen = head or True
    adapter = load_folder(model, fetched.own(), head=chosen)
    adapter.export(output, format=form, overwrite=overwrite)
    say(f"{output}: {manifest.name} in {form} format")


def _export_to_vllm(
    source: str,
    output: str,
    overwrite: bool,
    backbone: str | None,
    head: str | None,
    registry: str | None,
    max_rank: int,
    max_lost: float,
) -> None:
    from adapterhub.registry.pull import pull_verified

    saved = pull_verified(source, registry=registry).own()
    manifest = saved.manifest
    with doing("loading torch"):
        from adapterhub.merging.vllm import in_vllm

    export = in_vllm(
        saved,
        backbone=backbone,
        head=head,
        max_rank=max_rank,
        max_lost=max_lost,
    )
    export.write(Path(output), overwrite=overwrite)
    say(f"{output}: {manifest.name} for vLLM, a LoRA of rank {export.rank}")
    for note in export.notes:
        say(f"- {note}")
    place = shlex.quote(backbone or manifest.backbone.location)
    module = shlex.quote(f"{manifest.name}={output}")
    say(f"vllm serve {place} --enable-lora --max-lora-rank {max_rank} --lora-modules {module}")


def _check(
    target: str,
    source: str | None,
    method: str | None,
    backbone: str | None,
    task: str | None,
    max_lora_rank: int,
    registry: str | None,
) -> None:
    if target not in _TARGETS:
        raise unknown("target library", target, _TARGETS)
    with doing("loading torch"):
        from adapterhub.adapters.export import blocking, compare_method, peft_is_installed
        from adapterhub.backbones.load import meta_model
        from adapterhub.backbones.task_models import TASK_MODELS
        from adapterhub.interchange.peft.vllm import is_served
        from adapterhub.merging.vllm import blocking_vllm

    spec, place, kind, labels = _subject(source, method, backbone, task, registry)
    names = labels or (("0", "1") if TASK_MODELS[kind].classes else ())
    model = meta_model(place, task=kind, labels=names)
    converted = False
    if target == "vllm":
        problems, converted = blocking_vllm(model, spec, max_lora_rank)
    else:
        problems = blocking(model, spec)
    compared = not problems and not converted and peft_is_installed()
    if compared:
        problems = compare_method(model, spec)
    for problem in problems:
        say(f"- {problem}")
    if problems:
        summary = f"{len(problems)} problem{'s' * (len(problems) != 1)}"
    elif converted:
        summary = (
            f"no problems; converted to a LoRA of rank {max_lora_rank}: --to vllm prints what is "
            "lost"
        )
    else:
        outputs = "equal with random weights" if compared else "not compared, peft is missing"
        summary = f"no problems; outputs {outputs}"
    if target == "vllm" and not problems and is_served(type(model).__name__) is None:
        name = type(model).__name__
        say(f"not checked, as no vLLM here has it: whether {name} takes LoRA", err=True)
    say(f"{target}: {summary}")
    sys.exit(1 if problems else 0)


def _subject(
    source: str | None,
    method: str | None,
    backbone: str | None,
    task: str | None,
    registry: str | None,
) -> tuple[Spec, str, str, tuple[str, ...]]:
    """Return the method spec, backbone, kind of model and labels to check."""
    from adapterhub.inference.record import task_and_kind, training_record

    if source is None:
        if not method or not backbone:
            raise ConfigError(
                "nothing to check",
                expected="ADAPTER, RECIPE.yaml, or --method and --backbone",
            )
        return method, backbone, task_and_kind(task or "causal-lm")[1], ()
    if not (is_file(source) or source.endswith((".yaml", ".yml"))):
        from adapterhub.files.native import Saved
        from adapterhub.files.run_folder import backbone_of_adapter
        from adapterhub.registry.pull import pull

        folder = pull(source, registry=registry)
        manifest = Saved.at(folder).manifest
        place, _ = backbone_of_adapter(folder, manifest, backbone)
        return manifest.methods, place, training_record(manifest, task).kind, manifest.labels
    from adapterhub.recipe.recipe import read
    from adapterhub.tasks.common.infer_task import DEFAULT, usual_method

    recipe = read(source)
    kind = task_and_kind(task or recipe.task or DEFAULT)[1]
    spec: Spec = recipe.method or usual_method(kind)  # type: ignore[assignment]
    return method or spec, backbone or recipe.backbone, kind, ()

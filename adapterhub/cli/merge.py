"""`adapterhub merge`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._format import print_json, say
from adapterhub.cli._options import (
    as_json_option,
    backbone_place_option,
    head_option,
    registry_option,
    require_signature_option,
    task_option,
)
from adapterhub.errors import ConfigError
from adapterhub.status import doing

if TYPE_CHECKING:
    from adapterhub.adapters.adapter import Adapter
    from adapterhub.inference.merged_checkpoint import SentenceEncoder
    from adapterhub.inference.record import TrainingRecord
    from adapterhub.merging.merge import Merge


@click.command("merge")
@click.argument("reference", metavar="ADAPTER")
@click.option("--output", required=True, help="New folder for the checkpoint.")
@backbone_place_option
@click.option(
    "--base-dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Dtype of the backbone and the checkpoint (default: fp32, which rounds least).",
)
@click.option(
    "--requantize",
    is_flag=True,
    help="Merge into the backbone quantized as in training and quantize the result again. "
    "Much of the adapter may be lost; the difference is printed.",
)
@click.option(
    "--tolerance",
    type=float,
    help="Largest accepted difference, relative to the largest logit (default: 1e-4 in fp32, "
    "0.01 in fp16, 0.1 in bf16, no limit with --requantize).",
)
@task_option
@head_option
@registry_option
@require_signature_option
@as_json_option
def command(
    reference: str,
    output: str,
    backbone: str | None,
    task: str | None,
    head: str | None,
    registry: str | None,
    base_dtype: str | None,
    requantize: bool,
    tolerance: float | None,
    as_json: bool,
) -> None:
    """Merge an adapter into its backbone and write a plain transformers checkpoint.

    ADAPTER is a run folder, an adapter folder or a published name. The checkpoint loads without
    adapterhub: with transformers, and with sentence-transformers if its outputs are vectors or the
    head reads a pooling that the model's class does not have. Its outputs on a probe batch are
    compared with those of the adapter, before writing and after reloading.

    The backbone is loaded unquantized. With --requantize it is quantized, and so is the
    checkpoint; the reloaded model is then compared with the merged one.
    """
    if requantize and base_dtype:
        raise ConfigError(
            f"--base-dtype {base_dtype} loads the backbone unquantized, --requantize quantized",
            expected="one of the two",
        )
    record = _checked_record(reference, output, backbone, registry, head, task)
    with doing("loading torch"):
        from adapterhub.backbones.task_models import TEXT_TO_IMAGE
        from adapterhub.inference.merged_checkpoint import merge_for_checkpoint, write_checkpoint
        from adapterhub.inference.open import load_for_merging
        from adapterhub.inference.record import FEATURES

    of_base = None if requantize else base_dtype or "fp32"
    adapter, tokenizer = load_for_merging(
        reference, backbone, of_base, registry=registry, head=head, task=task
    )
    if record.kind == TEXT_TO_IMAGE:
        _merge_pipeline(adapter, tokenizer, output, tolerance, as_json)
        return
    model = adapter.backbone.pretrained
    with doing("merging"):
        of_model = None if record.kind == FEATURES else record.task.for_model(model)
        merged, expected, encoder = merge_for_checkpoint(adapter, tolerance, of_base, of_model)
    base, (dtype, kind) = adapter.backbone.source, adapter.backbone.dtype_and_quantization({})
    if not as_json:
        say(f"{adapter.name} merged into {base}, {kind or dtype}")
        _print_differences("merged", merged.differences, merged)
    with doing(f"writing and reloading {output}"):
        reloaded = write_checkpoint(model, tokenizer, output, expected, tolerance, encoder)
    if as_json:
        facts = {"output": output, "dtype": dtype, "quantization": kind}
        print_json(facts | _as_dict(merged) | {"loaded again": reloaded})
    else:
        _print_differences("reloaded", reloaded, merged)
        say(_loading(adapter, encoder, output))


def _merge_pipeline(
    adapter: Adapter, pipeline: Any, output: str, tolerance: float | None, as_json: bool
) -> None:
    from adapterhub.inference.merged_pipeline import write_pipeline

    with doing(f"merging, writing and reloading {output}"):
        differences = write_pipeline(adapter, pipeline, output, tolerance)
    if as_json:
        print_json({"output": output, **differences})
        return
    for stage, far in differences.items():
        say(f"{stage:8} an image of 0 to 1    max |difference| {far:.2e}")
    say(f"DiffusionPipeline.from_pretrained({output!r})")


def _loading(adapter: Adapter, encoder: SentenceEncoder | None, output: str) -> str:
    """Return the line of Python code that loads the checkpoint."""
    from adapterhub.inference.merged_checkpoint import auto_class

    if encoder is None:
        return f"{auto_class(adapter.backbone.pretrained).__name__}.from_pretrained({output!r})"
    outputs = f"logits: {', '.join(adapter.labels)}" if encoder.head else "vectors"
    return f"SentenceTransformer({output!r}).encode(texts)  # {outputs}"


def _checked_record(
    reference: str,
    output: str,
    backbone: str | None,
    registry: str | None,
    head: str | None,
    task: str | None,
) -> TrainingRecord:
    """Run the checks that do not need torch; return the adapter's training record."""
    from adapterhub.backbones.torch_free_checks import check_backbone_options
    from adapterhub.files.atomic import check_place
    from adapterhub.inference.record import read_training_record

    check_place(Path(output), overwrite=False, replaceable=())
    record = read_training_record(reference, registry, head, task)
    if backbone:
        check_backbone_options(backbone)
    return record


def _as_dict(merged: Merge) -> dict[str, Any]:
    limits = {n: t if math.isfinite(t) else None for n, t in merged.tolerances.items()}
    return {"tolerance": limits, "merged": merged.differences}


def _print_differences(stage: str, differences: dict[str, float], merged: Merge) -> None:
    for name, value in differences.items():
        tolerance = merged.tolerances[name]
        if math.isfinite(tolerance):
            scale = f"tolerance {tolerance:.2e}"
        else:
            scale = f"largest value {merged.expected[name].abs().max().item():.2e}"
        say(f"{stage:8} {name:20} max |difference| {value:.2e}, {scale}")

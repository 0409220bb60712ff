"""`adapterhub merge`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from adapterhub.errors import ConfigError

if TYPE_CHECKING:
    from adapterhub.merging.merge import Merge


@click.command("merge")
@click.argument("folder", metavar="DIR")
@click.option("--output", required=True, help="The folder for the checkpoint; it must not exist.")
@click.option("--backbone", help="Where to load the backbone from, if not from its own id.")
@click.option(
    "--base-dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="The dtype of the backbone and of the checkpoint; by default fp32, which rounds least.",
)
@click.option(
    "--requantize",
    is_flag=True,
    help="Merge into the backbone quantized as it was for training, and quantize the merged "
    "weights again. What that loses is printed; it may be much of the adapter.",
)
@click.option(
    "--tolerance",
    type=float,
    help="The largest difference to accept, as a part of the largest logit; by default 1e-4 in "
    "fp32, 0.01 in fp16, 0.1 in bf16, and none with --requantize.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    folder: str,
    output: str,
    backbone: str | None,
    base_dtype: str | None,
    requantize: bool,
    tolerance: float | None,
    as_json: bool,
) -> None:
    """Merge the adapter in DIR (a run's output, or an adapter's folder) into its backbone, and
    write a plain transformers checkpoint, which needs no adapterhub.

    The backbone is loaded whole, without quantization unless you ask for --requantize, and the
    merged model is compared with the live adapter on a probe batch, before it is written and after
    it is loaded again. With --requantize the checkpoint is quantized, and what is loaded again is
    compared with the merged model.
    """
    from adapterhub.backbones.load import storage_of
    from adapterhub.backbones.probe import probe
    from adapterhub.files.atomic import check_place
    from adapterhub.inference.open import load_for_merging
    from adapterhub.merging.checkpoint import auto_class, write_checkpoint
    from adapterhub.merging.merge import merge

    if requantize and base_dtype:
        raise ConfigError(
            f"--base-dtype {base_dtype} loads the backbone whole, --requantize quantized",
            expected="one of the two",
        )
    check_place(Path(output), overwrite=False, replaceable=())
    adapter, tokenizer = load_for_merging(
        folder, backbone, None if requantize else base_dtype or "fp32"
    )
    model = adapter.model
    base, (dtype, kind) = model.config._name_or_path, storage_of(model, {})
    made = merge(model, tolerance=tolerance, requantize=requantize)
    if not as_json:
        click.echo(f"{adapter.name} merged into {base}, {kind or dtype}")
        _print("merged", made.differences, made)
    expected = probe(model) if requantize else made.expected
    written = write_checkpoint(model, tokenizer, output, expected, tolerance)
    if as_json:
        limits = {n: t if math.isfinite(t) else None for n, t in made.tolerances.items()}
        facts = {"output": output, "dtype": dtype, "quantization": kind, "tolerance": limits}
        click.echo(json.dumps(facts | {"merged": made.differences, "loaded again": written}))
        return
    _print("loaded again", written, made)
    click.echo(f"{auto_class(model).__name__}.from_pretrained({output!r})")


def _print(what: str, differences: dict[str, float], made: Merge) -> None:
    for name, value in differences.items():
        limit = made.tolerances[name]
        of = made.expected[name].abs().max().item()
        beside = f"tolerance {limit:.2e}" if math.isfinite(limit) else f"of values up to {of:.2e}"
        click.echo(f"{what:14} {name:20} max |difference| {value:.2e}, {beside}")

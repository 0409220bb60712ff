"""`adapterhub merge`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from adapterhub.merging import Merge


@click.command("merge")
@click.argument("folder", metavar="DIR")
@click.option("--output", required=True, help="The folder for the checkpoint; it must not exist.")
@click.option("--backbone", help="Where to load the backbone from, if not from its own id.")
@click.option(
    "--base-dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    show_default=True,
    help="The dtype of the backbone and of the checkpoint. fp32 rounds least.",
)
@click.option(
    "--tolerance",
    type=float,
    help="The largest difference to accept, as a part of the largest logit; by default 1e-4 in "
    "fp32, 0.01 in fp16, 0.1 in bf16.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    folder: str,
    output: str,
    backbone: str | None,
    base_dtype: str,
    tolerance: float | None,
    as_json: bool,
) -> None:
    """Merge the adapter in DIR (a run's output, or an adapter's folder) into its backbone, and
    write a plain transformers checkpoint, which needs no adapterhub.

    The backbone is loaded whole, without quantization, and the merged model is compared with the
    live adapter on a probe batch, before it is written and after it is loaded again.
    """
    from adapterhub.files.folder import check_place
    from adapterhub.merging import merge
    from adapterhub.training.merged import auto_class, open_live, write_checkpoint

    check_place(Path(output), overwrite=False, replaceable=())
    adapter, tokenizer = open_live(folder, backbone, base_dtype)
    model = adapter.model
    base = model.config._name_or_path
    made = merge(model, tolerance=tolerance)
    if not as_json:
        click.echo(f"{adapter.name} merged into {base}, {base_dtype}")
        _print("merged", made.differences, made)
    written = write_checkpoint(model, tokenizer, output, made.expected, tolerance)
    if as_json:
        facts = {"output": output, "dtype": base_dtype, "tolerance": made.tolerances}
        click.echo(json.dumps(facts | {"merged": made.differences, "loaded again": written}))
        return
    _print("loaded again", written, made)
    click.echo(f"{auto_class(model).__name__}.from_pretrained({output!r})")


def _print(what: str, differences: dict[str, float], made: Merge) -> None:
    for name, value in differences.items():
        click.echo(
            f"{what:14} {name:20} max |difference| {value:.2e}, "
            f"tolerance {made.tolerances[name]:.2e}"
        )

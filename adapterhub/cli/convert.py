"""`adapterhub convert`."""

from __future__ import annotations

from typing import Any

import click

from adapterhub.cli._conversion import write_as_lora
from adapterhub.cli._options import (
    as_json_option,
    backbone_place_option,
    registry_option,
    require_signature_option,
)

_RANKS = "The largest rank."
_ENERGY = "The share of each update's squared singular values that is kept, such as 0.99."
_EVAL = "Labelled data on which both adapters are evaluated."


@click.command("convert")
@click.argument("reference", metavar="ADAPTER")
@click.option("--output", required=True, help="Folder for the new adapter.")
@click.option("--to", type=click.Choice(["lora"]), default="lora", show_default=True)
@click.option("--rank", type=click.IntRange(1), help=_RANKS)
@click.option("--energy", type=float, help=_ENERGY)
@click.option("--eval", "data", metavar="FILE", help=_EVAL)
@backbone_place_option
@registry_option
@require_signature_option
@as_json_option
def command(reference: str, to: str, **options: Any) -> None:
    """Convert an adapter of any method that changes weights into a LoRA.

    ADAPTER is a run folder, an adapter folder or a published name. Without --rank and --energy the
    LoRA is equal to it, which is possible where the updates have a rank of their own. Rotations
    have none. The difference of the outputs on a probe batch is printed.
    """
    write_as_lora(reference, **options)

"""`adapterhub resize`."""

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
from adapterhub.errors import ConfigError


@click.command("resize")
@click.argument("reference", metavar="ADAPTER")
@click.option("--output", required=True, help="Folder for the new adapter.")
@click.option("--rank", type=click.IntRange(1), help="The largest rank.")
@click.option("--energy", type=float, help="The share of each update that is kept: 0.99.")
@click.option("--eval", "data", metavar="FILE", help="Data on which both are evaluated.")
@backbone_place_option
@registry_option
@require_signature_option
@as_json_option
def command(reference: str, **options: Any) -> None:
    """Give a LoRA another rank: the nearest one, site by site.

    With --energy each site gets the least rank that keeps this share of its update.
    """
    if options["rank"] is None and options["energy"] is None:
        raise ConfigError("no rank", expected="--rank R, or --energy 0.99")
    write_as_lora(reference, **options)

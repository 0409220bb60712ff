"""`adapterhub resize`."""

from __future__ import annotations

from typing import Any

import click

from adapterhub.cli._conversion import conversion_options, print_ranks, write_as_lora
from adapterhub.errors import ConfigError


@click.command("resize")
@conversion_options
@click.option("--output", help="Folder for the new adapter; without it nothing is written.")
def command(output: str | None, **options: Any) -> None:
    """Give a LoRA another rank: the nearest one, site by site.

    With --energy each site gets the least rank that keeps this share of its update. Without
    --output, print the share of the whole update that each rank would keep.
    """
    flags = {"rank": "--rank", "energy": "--energy", "data": "--eval"}
    chosen = [flag for name, flag in flags.items() if options[name] is not None]
    if output is None and chosen:
        raise ConfigError(f"{chosen[0]} without a folder", expected="--output DIR")
    if output is None:
        print_ranks(
            options["reference"],
            backbone=options["backbone"],
            registry=options["registry"],
            as_json=options["as_json"],
        )
        return
    if options["rank"] is None and options["energy"] is None:
        raise ConfigError("no rank", expected="--rank R, or --energy 0.99")
    write_as_lora(output=output, **options)

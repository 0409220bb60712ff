"""`adapterhub resize`."""

from __future__ import annotations

from typing import Any

import click

from adapterhub.cli._conversion import conversion_options, write_as_lora
from adapterhub.errors import ConfigError


@click.command("resize")
@conversion_options
def command(**options: Any) -> None:
    """Give a LoRA another rank: the nearest one, site by site.

    With --energy each site gets the least rank that keeps this share of its update.
    """
    if options["rank"] is None and options["energy"] is None:
        raise ConfigError("no rank", expected="--rank R, or --energy 0.99")
    write_as_lora(**options)

"""`adapterhub convert`."""

from __future__ import annotations

from typing import Any

import click

from adapterhub.cli._conversion import conversion_options, write_as_lora


@click.command("convert")
@conversion_options
@click.option("--output", required=True, help="Folder for the new adapter.")
@click.option("--to", type=click.Choice(["lora"]), default="lora", show_default=True)
def command(to: str, **options: Any) -> None:
    """Convert an adapter of any method that changes weights into a LoRA.

    ADAPTER is a run folder, an adapter folder or a published name. Without --rank and --energy the
    LoRA is equal to it, which is possible where the updates have a rank of their own. Rotations
    have none. The difference of the outputs on a probe batch is printed.
    """
    write_as_lora(**options)

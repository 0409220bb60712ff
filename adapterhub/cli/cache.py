"""`adapterhub cache`."""

from __future__ import annotations

from datetime import datetime

import click

from adapterhub.cli._format import examples, print_json, say
from adapterhub.cli._publishing import as_json_option


@click.command(
    "cache",
    epilog=examples(
        "adapterhub cache                       # what is there, and how large",
        "adapterhub cache --clear",
    ),
)
@click.option("--clear", is_flag=True, help="Delete all of it.")
@as_json_option
def command(clear: bool, as_json: bool) -> None:
    """List or delete the outputs of frozen layers that training keeps on disk.

    They are kept there with train.frozen_cache=disk, or where they do not fit in memory. They are
    computed anew if they are missing.
    """
    from adapterhub.training.activation_folders import (
        activation_entries,
        activations_folder,
        clear_activations,
    )

    entries = activation_entries()
    cleared = clear_activations() if clear else 0
    total = sum(entry.size for entry in entries)
    if as_json:
        rows = [{"folder": e.folder.name, "bytes": e.size, "used": e.used} for e in entries]
        print_json(
            {
                "folder": str(activations_folder()),
                "entries": rows,
                "cleared": cleared,
            }
        )
    elif clear:
        say(f"deleted {cleared / 1e6:,.1f} MB in {activations_folder()}")
    else:
        for entry in entries:
            used = f"{datetime.fromtimestamp(entry.used):%Y-%m-%d %H:%M}"
            say(f"{entry.folder.name}  {entry.size / 1e6:>10,.1f} MB  last used {used}")
        say(f"{len(entries)} entries, {total / 1e6:,.1f} MB in {activations_folder()}")

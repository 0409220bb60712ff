"""`adapterhub sample`: small data sets to try commands on."""

from __future__ import annotations

from pathlib import Path

import click

from adapterhub.cli._format import say, say_text
from adapterhub.config.user_folders import is_there
from adapterhub.errors import ConfigError, OutputError


@click.command("sample")
@click.argument("name", required=False)
@click.argument("path", required=False)
@click.option("--rows", type=click.IntRange(1), metavar="N", help="Number of rows.  [default: all]")
@click.option("--held-out", is_flag=True, help="Tables: rows to evaluate on, not to train on.")
def command(name: str | None, path: str | None, rows: int | None, held_out: bool) -> None:
    """Write a small data set to try commands on; without NAME, list them.

    A table is printed as CSV (chats as JSON lines), or written to PATH: .csv, .tsv, .jsonl or
    .parquet. Images and audio are written to a new folder PATH, in train/ and eval/. No sample is
    downloaded.
    """
    from adapterhub.data.samples import SAMPLES, find_sample, sample_table, write_sample_folder

    if name is None:
        width = max(map(len, SAMPLES))
        say_text("\n".join(f"{each:{width}}  {s.description}" for each, s in SAMPLES.items()))
        return
    sample = find_sample(name)
    if path and is_there(path):
        raise OutputError(f"{path} is already there", hint="another PATH")
    if sample.folder:
        if not path or held_out:
            subject = "--held-out" if held_out else f"no folder for {name}"
            raise ConfigError(
                f"{subject}: images and audio are written to a folder, both train/ and eval/",
                hint=f"adapterhub sample {name} {name}",
            )
        counts = write_sample_folder(name, Path(path), rows)
        parts = ", ".join(f"{n:,} files in {Path(path) / part}" for part, n in counts.items())
        say(f"{parts}; {sample.example.replace('PATH', path)}", err=True)
        return
    from adapterhub.inference.table_file import check_table_file, table_text, write_table_file

    columns = sample_table(name, rows, held_out=held_out)
    if not path:
        say_text(table_text(columns).removesuffix("\n"))
        return
    check_table_file(Path(path), "PATH")
    write_table_file(Path(path), columns)
    count = len(next(iter(columns.values())))
    example = "" if held_out else f"; {sample.example.replace('PATH', path)}"
    say(f"{count:,} rows in {path}{example}", err=True)

"""`adapterhub list`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from adapterhub.cli._format import bytes_text, count_text, print_table
from adapterhub.errors import ConfigError
from adapterhub.files.manifest import LOWER_IS_BETTER

if TYPE_CHECKING:
    from adapterhub.registry.store import Entry


@click.command("list")
@click.argument("text", nargs=-1)
@click.option("--registry", help="A registry's folder (none: the user's own).")
@click.option("--hub", is_flag=True, help="Search the Hugging Face Hub instead.")
@click.option("--endpoint", help="Search a hub of your own instead: https://hub.example.org.")
@click.option("--backbone", help="Only adapters of this backbone: its id or fingerprint.")
@click.option("--task", help="Only adapters for this task.")
@click.option("--method", help="Only adapters of this method.")
@click.option("--tag", "tags", multiple=True, help="Only with this tag or topic.")
@click.option("--metric", help="Only adapters that have this metric.")
@click.option("--sort", default="name", help="name, size, or a metric: the best first.")
@click.option("--all", "all_versions", is_flag=True, help="All versions, not the newest alone.")
@click.option(
    "--limit", type=click.IntRange(1), default=50, show_default=True, help="At most so many."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def command(
    text: tuple[str, ...],
    registry: str | None,
    hub: bool,
    endpoint: str | None,
    as_json: bool,
    **fields: Any,
) -> None:
    """List published adapters; with TEXT those whose name, backbone, task, method, tags, topics or
    card have words that start so."""
    from adapterhub.registry.search import search

    if registry and not Path(registry).is_dir():
        raise ConfigError(f"there is no folder {registry!r}", expected="a registry's folder")
    found = search(" ".join(text), registry=registry, hub=endpoint or hub, **fields)
    if as_json:
        for entry in found:
            click.echo(json.dumps(asdict(entry), sort_keys=True))
    elif found:
        print_table(entries_table(found, fields["sort"]))
    else:
        where = endpoint or ("the Hub" if hub else registry or "the registry")
        click.echo(f"{where} has no such adapter", err=True)
        if not (hub or endpoint):
            click.echo("adapterhub publish RUN puts one there", err=True)


def entries_table(found: list[Entry], metric: str | None = None) -> Table:
    """What a person looks for first; `metric` is the one to show, where an adapter has it."""
    table = Table("adapter", "backbone", "task", "method", "score", "parameters", "size", "tags")
    for column in table.columns[:2]:
        column.no_wrap = True
    for entry in found:
        table.add_row(
            entry.reference,
            entry.backbone.rpartition("/")[2],
            entry.task or "",
            " + ".join(entry.methods),
            score_text(entry, metric),
            count_text(entry.parameters),
            bytes_text(entry.size),
            " ".join((*entry.tags, *entry.topics))
            + (" yanked" if entry.yanked is not None else ""),
        )
    return table


def score_text(entry: Entry, metric: str | None = None) -> str:
    """A metric: the one that is asked for, or the first by name that is no loss."""
    scores = [name for name in sorted(entry.metrics) if name not in LOWER_IS_BETTER]
    name = metric if metric in entry.metrics else next(iter(scores), None)
    return "" if name is None else f"{name} {entry.metrics[name]:.3f}"

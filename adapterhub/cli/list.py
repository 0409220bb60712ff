"""`adapterhub list`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._format import PlainTable, bytes_text, count_text, print_json, print_table, say
from adapterhub.cli._publishing import backbone_option, registry_option
from adapterhub.files.manifest import LOWER_IS_BETTER

# Columns that a narrow terminal leaves out, the first one first.
OPTIONAL_COLUMNS = ("parameters", "tags", "size", "task")

if TYPE_CHECKING:
    from adapterhub.registry.store import Entry


@click.command("list")
@click.argument("text", nargs=-1)
@registry_option
@click.option("--hub", is_flag=True, help="Search the Hugging Face Hub.")
@click.option("--endpoint", help="Search your own hub: https://hub.example.org.")
@backbone_option
@click.option("--task", help="Only for this task.")
@click.option("--method", help="Only of this method.")
@click.option("--tag", "tags", multiple=True, help="Only with this tag or topic.")
@click.option("--metric", help="Only with this metric.")
@click.option("--sort", default="name", help="Sort by name, size or a metric (best first).")
@click.option("--all", "all_versions", is_flag=True, help="List all versions, not only the newest.")
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=50,
    show_default=True,
    help="Maximum number of adapters.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def command(
    text: tuple[str, ...],
    registry: str | None,
    hub: bool,
    endpoint: str | None,
    as_json: bool,
    **fields: Any,
) -> None:
    """List published adapters, or those that match TEXT.

    TEXT matches the beginnings of words in the name, backbone, task, method, tags, topics and card.
    """
    from adapterhub.registry.search import search

    entries = search(" ".join(text), registry=registry, hub=endpoint or hub, **fields)
    if as_json:
        for entry in entries:
            print_json(asdict(entry))
    elif entries:
        print_table(entries_table(entries, fields["sort"]), OPTIONAL_COLUMNS)
    else:
        store = endpoint or ("the Hub" if hub else registry or "the registry")
        say(f"no matching adapter in {store}", err=True)
        if not (hub or endpoint):
            say("to add one: adapterhub publish RUN", err=True)


def entries_table(entries: list[Entry], metric: str | None = None) -> PlainTable:
    """Build the table of published versions; `score` shows `metric` where a version has it."""
    table = PlainTable(
        "adapter", "backbone", "task", "method", "score", "parameters", "size", "tags"
    )
    for column in table.columns[:2]:
        column.no_wrap = True
    for entry in entries:
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
    """Format the score of a version: `metric`, or its first metric where higher is better."""
    scores = [name for name in sorted(entry.metrics) if name not in LOWER_IS_BETTER]
    name = metric if metric in entry.metrics else next(iter(scores), None)
    return "" if name is None else f"{name} {entry.metrics[name]:.3f}"

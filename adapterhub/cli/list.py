"""`adapterhub list`."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._format import (
    bytes_text,
    print_json,
    print_table,
    say,
)
from adapterhub.cli._options import backbone_option, registry_option
from adapterhub.errors import one_line
from adapterhub.files.manifest import LOWER_IS_BETTER
from adapterhub.files.shown_table import ShownTable

# Columns dropped on a narrow terminal, in this order.
_COMMON = ("backbone", "task")
OPTIONAL_COLUMNS = ("parameters", "tags", "task", "backbone", "date", "size")

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
@click.option("--sort", default="name", help="Sort by name, newest, size or a metric (best first).")
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
        _print_entries(entries, fields["sort"])
    elif hub or endpoint:
        say(f"no matching adapter in {endpoint or 'the Hub'}", err=True)
    else:
        _explain(" ".join(text), registry, fields)


def _explain(text: str, registry: str | None, fields: dict[str, Any]) -> None:
    """Explain why nothing matches in a local registry."""
    from adapterhub.registry.local import registry_at
    from adapterhub.registry.search import why_empty
    from adapterhub.registry.store import Query

    lines = why_empty(Query(text, **fields), registry)
    if not lines:
        say(f"no adapter in the registry {registry_at(registry).location}", err=True)
        say("to add one: adapterhub publish RUN", err=True)
    for line in lines:
        say(line, err=True)


def _print_entries(entries: Sequence[Entry], metric: str) -> None:
    """Print the table of entries; on narrow terminals, common values are dropped first."""
    table = entries_table(entries, metric)
    columns = dict(zip(table.columns, zip(*table.rows, strict=True), strict=True))
    common = [n for n, cells in columns.items() if n in _COMMON and len({*cells}) == 1]
    first, *rest = OPTIONAL_COLUMNS
    optional = (first, *common, *(name for name in rest if name not in common))
    print_table(table, optional, unbroken=table.columns[:2])


def entries_table(entries: Sequence[Entry], metric: str | None = None) -> ShownTable:
    """Build the table of published versions, without columns that would be empty.

    `metric` is shown for versions that have it, instead of the main metric of their task.
    """
    columns = {
        "adapter": [entry.reference for entry in entries],
        "backbone": [_short_backbone(entry.backbone) for entry in entries],
        "task": [entry.task or "" for entry in entries],
        "method": [" + ".join(entry.methods) for entry in entries],
        "score": [_score(entry, metric) for entry in entries],
        "size": [bytes_text(entry.size) for entry in entries],
        "date": [(entry.published or "")[:10] for entry in entries],
        "parameters": [f"{entry.parameters:,}" for entry in entries],
        "tags": [_tags(entry) for entry in entries],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    return ShownTable([*shown], [*zip(*shown.values(), strict=True)])


def _score(entry: Entry, metric: str | None) -> str:
    """Format the score of a version: `metric`, the main metric of its task, or its first one."""
    others = (name for name in sorted(entry.metrics) if name not in LOWER_IS_BETTER)
    for name in (metric, main_metric(entry.task), *others):
        if name in entry.metrics:
            return f"{name} {entry.metrics[name]:.3f}"
    return ""


@functools.lru_cache
def main_metric(task: str | None) -> str | None:
    """Return the main metric of a task; None for an unknown task."""
    from adapterhub.tasks import TASKS

    return TASKS[task]().main_metric if task in TASKS else None


def _short_backbone(backbone: str) -> str:
    """Shorten the id of a backbone: without its owner, or the local name's digits."""
    name = backbone.rpartition("/")[2]
    return re.sub(r"(?<=.)--[0-9a-f]{12}$", "", name)


def _tags(entry: Entry) -> str:
    yanked = ["yanked"] if entry.yanked is not None else []
    return one_line(" ".join((*entry.tags, *entry.topics, *yanked)))

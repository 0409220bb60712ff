"""`ah.search`: find adapters in a local registry or on a hub."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from adapterhub.registry.local import registry_at, store_of
from adapterhub.registry.store import SORTS, Entry, Query, Reference, Store, parse_reference

_ALL = 1_000_000  # more than a registry contains
_MOST_CHOICES = 8  # listed values of a field


def search(
    text: str = "",
    *,
    registry: str | Path | None = None,
    hub: bool | str = False,
    **fields: Any,
) -> list[Entry]:
    """Find the adapters that match a query, in a local registry or on a hub.

    Args:
        text: words or prefixes of words to find.
        registry: the folder of the local registry, if not the default one.
        hub: True to search the Hub instead, or the URL of a self-hosted hub.
        fields: `backbone` (an id or a fingerprint), `task`, `method`, `tags`, `metric`, `sort`
            (name, newest, size or a metric), `all_versions`, `limit`.

    Raises:
        RegistryError: the hub cannot be reached, or the folder of the registry does not exist.
        ConfigError: `hub` is not a valid URL.
    """
    return _store(registry, hub).search(Query(text, **fields))


def why_empty(query: Query, registry: str | Path | None = None) -> list[str]:
    """Explain why a query matches nothing in a local registry, one line for each reason.

    A filter that excludes everything is listed with the existing values. If each filter alone
    matches something, the number of matches without it is given. Nothing is returned for an empty
    registry. The first search has warned of broken versions, so this one does not.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _reasons(query, registry_at(registry))


def _reasons(query: Query, store: Store) -> list[str]:
    everything = Query(all_versions=query.all_versions, limit=_ALL)
    entries = store.search(everything)
    if not entries:
        return []
    filters = dict(_filters(query))
    alone = {name: store.search(replace(everything, **f)) for name, f in filters.items()}
    excluding = [name for name, rows in alone.items() if not rows]
    if excluding:
        return [f"no adapter has {name}{_choices(filters[name], entries)}" for name in excluding]
    lines = [f"no adapter has all of {', '.join(filters)}"]
    for name in filters:
        others = {k: v for other, f in filters.items() if other != name for k, v in f.items()}
        count = len(store.search(replace(everything, **others)))
        lines += [f"without {name}: {count}"] if count else []
    return lines


def _filters(query: Query) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each filter of a query, as text and as fields of a query."""
    for field in ("backbone", "task", "method", "metric"):
        if value := getattr(query, field):
            yield f"{field}={value}", {field: value}
    if query.sort not in (*SORTS, query.metric):
        yield f"the metric {query.sort} to sort by", {"sort": query.sort}
    for tag in query.tags:
        yield f"tag={tag}", {"tags": (tag,)}
    if query.text:
        yield f"the words {query.text!r}", {"text": query.text}


def _choices(fields: dict[str, Any], entries: Iterable[Entry]) -> str:
    """List the values of a field, the most frequent first, with their counts."""
    (field,) = fields
    names = {"backbone": "backbones", "task": "tasks", "method": "methods", "tags": "tags"}
    counts: Counter[str] = Counter()
    for entry in entries:
        counts.update(_values(entry, field))
    shown = [f"{value} ({count})" for value, count in counts.most_common(_MOST_CHOICES)]
    more = f" and {len(counts) - _MOST_CHOICES} more" if len(counts) > _MOST_CHOICES else ""
    return f"; {names.get(field, 'metrics')} here: {', '.join(shown)}{more}" if shown else ""


def _values(entry: Entry, field: str) -> Iterable[str]:
    if field == "text":
        return ()
    if field in ("metric", "sort"):
        return tuple(entry.metrics)
    if field == "tags":
        return (*entry.tags, *entry.topics)
    return entry.methods if field == "method" else filter(None, (getattr(entry, field),))


def _store(registry: str | Path | None, hub: bool | str) -> Store:
    if isinstance(hub, str):
        return store_of(parse_reference(f"{hub.rstrip('/')}/owner/name"))
    return store_of(Reference("hub", "")) if hub else registry_at(registry)

"""A model card as the Hub understands it: what a person reads, and the tags that searches use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from adapterhub.registry.store import Entry

_FIELDS = (
    "version", "digest", "fingerprint", "methods", "task", "metrics", "tags", "size", "parameters",
    "backbone", "description", "license", "language", "topics",
)  # fmt: skip

_LISTS = ("methods", "tags", "language", "topics")


def hub_card(card: bytes, entry: Entry) -> bytes:
    """The card of an adapter with the metadata that the Hub reads; what its writer said stays."""
    written = ModelCard(card.decode("utf-8", "replace"), ignore_metadata_errors=True)
    own: dict[str, Any] = written.data.to_dict()  # type: ignore[no-untyped-call]
    hub_id = {"base_model": entry.backbone, "base_model_relation": "adapter"}
    every = {name: _plain(getattr(entry, name)) for name in _FIELDS}
    fields = {name: value for name, value in every.items() if value not in (None, [])}
    data = ModelCardData(
        **{
            **own,
            **(hub_id if "/" in entry.backbone else {}),
            "library_name": "adapterhub",
            "model_name": entry.name.rpartition("/")[2],
            "tags": sorted({*own.get("tags", []), "adapterhub", *entry.methods}),
            "eval_results": _results(entry),
            "adapterhub": fields,
        }
    )
    text = f"---\n{data.to_yaml()}\n---\n{written.text.lstrip()}"
    return text.replace("\r\n", "\n").encode()


def entry_in(card: Any, name: str, prefix: str) -> Entry | None:
    """The entry that a card tells of, or None if it was not written by `hub_card`.

    A card is what its writer claims: `Store.get` verifies what is pulled.
    """
    data = card.to_dict() if hasattr(card, "to_dict") else dict(card or {})
    fields = data.get("adapterhub")
    if not isinstance(fields, Mapping) or not {"version", "digest", "methods"} <= fields.keys():
        return None
    known = {key: fields[key] for key in _FIELDS if key in fields}
    try:
        return Entry(
            **{
                "task": None,
                "fingerprint": "",
                **known,
                "reference": f"{prefix}{name}@{known['version']}",
                "name": name,
                "backbone": str(known.get("backbone") or data.get("base_model", "")),
                **{name: tuple(map(str, known.get(name, ()))) for name in _LISTS},
                "metrics": {str(k): float(v) for k, v in known.get("metrics", {}).items()},
            }
        )
    except (TypeError, ValueError, AttributeError):
        return None


def _results(entry: Entry) -> list[EvalResult]:
    return [
        EvalResult(
            task_type=entry.task or "other",
            dataset_type="evaluation data",
            dataset_name="evaluation data of the recipe",
            metric_type=name,
            metric_value=value,
        )
        for name, value in sorted(entry.metrics.items())
    ]


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value

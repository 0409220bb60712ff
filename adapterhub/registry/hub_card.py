"""The model card of a published adapter: the Hub's metadata in addition to the text."""

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
    """Add the metadata that the Hub indexes to a card; the text and other metadata are kept."""
    model_card = ModelCard(card.decode("utf-8", "replace"), ignore_metadata_errors=True)
    metadata: dict[str, Any] = model_card.data.to_dict()  # type: ignore[no-untyped-call]
    base_model = {"base_model": entry.backbone, "base_model_relation": "adapter"}
    values = {name: _plain(getattr(entry, name)) for name in _FIELDS}
    fields = {name: value for name, value in values.items() if value not in (None, [])}
    data = ModelCardData(
        **{
            **metadata,
            **(base_model if "/" in entry.backbone else {}),
            "library_name": "adapterhub",
            "model_name": entry.name.rpartition("/")[2],
            "tags": sorted({*metadata.get("tags", []), "adapterhub", *entry.methods}),
            "eval_results": _results(entry),
            "adapterhub": fields,
        }
    )
    text = f"---\n{data.to_yaml()}\n---\n{model_card.text.lstrip()}"
    return text.replace("\r\n", "\n").encode()


def entry_from_card(card: Any, name: str, prefix: str) -> Entry | None:
    """Read the entry in the metadata that `hub_card` wrote.

    A card is unverified: `Store.get` verifies the files when they are pulled.

    Args:
        card: the card's metadata, as huggingface_hub returns it.
        name: the repository, `owner/name`.
        prefix: the start of a reference to this hub, such as `hf:`.

    Returns:
        The entry, or None if the card has none or it cannot be read.
    """
    metadata = card.to_dict() if hasattr(card, "to_dict") else dict(card or {})
    section = metadata.get("adapterhub")
    if not isinstance(section, Mapping) or not {"version", "digest", "methods"} <= section.keys():
        return None
    fields = {key: section[key] for key in _FIELDS if key in section}
    try:
        return Entry(
            **{
                "task": None,
                "fingerprint": "",
                **fields,
                "reference": f"{prefix}{name}@{fields['version']}",
                "name": name,
                "backbone": str(fields.get("backbone") or metadata.get("base_model", "")),
                **{key: tuple(map(str, fields.get(key, ()))) for key in _LISTS},
                "metrics": {str(k): float(v) for k, v in fields.get("metrics", {}).items()},
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

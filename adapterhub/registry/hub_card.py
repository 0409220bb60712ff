"""The model card of a published adapter: the Hub's metadata in addition to the text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from adapterhub.registry.store import Entry

_FIELDS = (
    "version", "digest", "fingerprint", "methods", "task", "metrics", "tags", "size", "parameters",
    "backbone", "description", "license", "language", "topics",
)  # fmt: skip

_TEXTS = ("task", "backbone", "description", "license")
_FORMS = {"version": r"v[1-9]\d{0,8}", "digest": "[0-9a-f]{64}", "fingerprint": r"[\w.:+-]{1,200}"}
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
    metadata = card.to_dict() if hasattr(card, "to_dict") else card
    section = metadata.get("adapterhub") if isinstance(metadata, Mapping) else None
    try:
        if not isinstance(section, Mapping) or not _is_entry(section):
            return None
        fields = {key: section[key] for key in _FIELDS if key in section}
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


def _is_entry(section: Mapping[str, Any]) -> bool:
    """Return whether the fields of a card have the types and the forms of an entry."""
    if any(not isinstance(section.get(key, []), list) for key in _LISTS):
        return False
    numbers = [section.get(key, 0) for key in ("size", "parameters")]
    texts = [section.get(key) for key in _TEXTS]
    return (
        {"version", "digest", "methods"} <= section.keys()
        and all(re.fullmatch(p, str(section.get(key, ""))) for key, p in _FORMS.items())
        and all(type(number) is int and 0 <= number < 2**63 for number in numbers)
        and all(text is None or isinstance(text, str) for text in texts)
        and all(map(math.isfinite, map(float, dict(section.get("metrics") or {}).values())))
    )


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

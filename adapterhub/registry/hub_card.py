"""The model card of a published adapter: the Hub's metadata in addition to the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from adapterhub.files import schema
from adapterhub.registry.store import Entry

_FIELDS = (
    "version", "digest", "fingerprint", "methods", "task", "metrics", "tags", "size", "parameters",
    "backbone", "description", "license", "language", "topics",
)  # fmt: skip

_LISTS = ("methods", "tags", "language", "topics")
_WORD = schema.text(r"[\w.:+/-]{1,200}", "a word")
_TEXT = schema.text(r"(?s).{0,2000}", "a text", null=True)
_COUNT = schema.integer(0, 2**63 - 1)
# Of a section of a stranger's card, whose values are printed and compared.
_SECTION = {
    "version": schema.text(r"v[0-9]{1,9}", "a version"),
    "digest": schema.text(r"[0-9a-f]{64}", "a sha256"),
    **dict.fromkeys(("fingerprint", "backbone"), _WORD),
    **dict.fromkeys(("task", "description", "license"), _TEXT),
    **dict.fromkeys(("size", "parameters"), _COUNT),
    **{name: schema.sequence(schema.text(r"(?s).{1,200}", "a text"), 0, 1000) for name in _LISTS},
    "metrics": schema.mapping(schema.text(r"(?s).{1,200}", "a metric"), schema.number),
}


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
    metadata = metadata if isinstance(metadata, Mapping) else {}
    section = metadata.get("adapterhub")
    if not isinstance(section, Mapping) or not {"version", "digest", "methods"} <= section.keys():
        return None
    base_model = metadata.get("base_model")
    fields = {
        **({"backbone": base_model} if isinstance(base_model, str) and base_model else {}),
        **{key: section[key] for key in _FIELDS if section.get(key) not in (None, "")},
    }
    if any(_SECTION[key](key, value) for key, value in fields.items()):
        return None
    return Entry(
        **{
            "task": None,
            "fingerprint": "",
            "backbone": "",
            **fields,
            "reference": f"{prefix}{name}@{fields['version']}",
            "name": name,
            **{key: tuple(fields.get(key, ())) for key in _LISTS},
            "metrics": {key: float(value) for key, value in fields.get("metrics", {}).items()},
        }
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

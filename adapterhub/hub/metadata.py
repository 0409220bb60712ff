"""What a repository says of itself: its card, and the tags that clients of the Hub search by.

Tools overwrite cards, so what an adapter is comes from its own files where they say it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from adapterhub.errors import AdapterhubError
from adapterhub.files import schema
from adapterhub.files.card import split_card
from adapterhub.files.manifest import MAX_MANIFEST_BYTES, Manifest, from_json
from adapterhub.files.native import CARD_FILE, MANIFEST_FILE, MAX_CARD_BYTES
from adapterhub.hub.commits import Tree
from adapterhub.registry.foreign import CONFIG_FILE, MAX_CONFIG_BYTES

ReadBlob = Callable[[str, int], bytes]
"""Returns the first bytes of a file, by its sha256."""
MOST_METADATA = 64 << 10
_MOST_TAGS, _MOST_TAG = 200, 200


@dataclass(frozen=True)
class HubDescription:
    """What is known of a commit.

    Attributes:
        card: the metadata of its card.
        tags: what clients filter by.
        library: the library that reads it.
        pipeline: the Hub's word for its task.
        files: the paths of its files.
    """

    card: Mapping[str, Any]
    tags: tuple[str, ...]
    library: str | None
    pipeline: str | None
    files: tuple[str, ...]

    def text(self) -> str:
        """Return it as the database keeps it."""
        return json.dumps(vars(self), ensure_ascii=False, default=str)


def parse_description(text: str) -> HubDescription:
    """Return what the database has."""
    fields: dict[str, Any] = json.loads(text)
    fields |= {name: tuple(fields[name]) for name in ("tags", "files")}
    return HubDescription(**fields)


def describe_tree(tree: Tree, read: ReadBlob) -> HubDescription:
    """Describe the files of a commit."""
    card = card_of(tree, read)
    config = _peft_config(tree, read)
    manifest = manifest_in(tree, read)
    library = _text(card.get("library_name"))
    if config and library in (None, "transformers"):
        library = "peft"
    elif library is None:
        library = "adapterhub" if manifest else "transformers" if "config.json" in tree else None
    pipeline = _text(card.get("pipeline_tag"))
    tags = dict.fromkeys(
        tag[:_MOST_TAG] for tag in _tags(card, config, manifest, tree, library, pipeline) if tag
    )
    return HubDescription(card, (*tags,)[:_MOST_TAGS], library, pipeline, (*sorted(tree),))


def card_of(tree: Tree, read: ReadBlob) -> dict[str, Any]:
    """Return the metadata of the card of a commit; none if it cannot be read."""
    blob = tree.get(CARD_FILE)
    if blob is None or blob.size > 2 * MAX_CARD_BYTES:
        return {}
    text = read(blob.sha256, 2 * MAX_CARD_BYTES).decode("utf-8", "replace")
    if front_matter_size(text) > MOST_METADATA:
        return {}
    metadata: dict[str, Any] = json.loads(json.dumps(split_card(text)[0], default=str))
    return metadata


def front_matter_size(card: str) -> int:
    """Return how many characters the metadata of a card has, about: to parse many takes seconds."""
    if not card.startswith("---"):
        return 0
    end = card.find("\n---", 3)
    return end if end >= 0 else 0


def manifest_in(tree: Tree, read: ReadBlob) -> Manifest | None:
    """Return the manifest of a commit; None if it has none of ours."""
    blob = tree.get(MANIFEST_FILE)
    if blob is None or blob.size > MAX_MANIFEST_BYTES:
        return None
    try:
        return from_json(read(blob.sha256, MAX_MANIFEST_BYTES))
    except AdapterhubError:
        return None


def _peft_config(tree: Tree, read: ReadBlob) -> dict[str, Any]:
    blob = tree.get(CONFIG_FILE)
    if blob is None or blob.size > MAX_CONFIG_BYTES:
        return {}
    return schema.parse_object(read(blob.sha256, MAX_CONFIG_BYTES), MAX_CONFIG_BYTES)[0]


def _tags(
    card: Mapping[str, Any],
    config: Mapping[str, Any],
    manifest: Manifest | None,
    tree: Tree,
    library: str | None,
    pipeline: str | None,
) -> Iterator[str]:
    if manifest is not None:
        yield "adapterhub"
    yield from filter(None, (library, pipeline))
    if any(path.endswith(".safetensors") for path in tree):
        yield "safetensors"
    if method := _text(config.get("peft_type")):
        yield method.lower()
    if manifest is not None:
        yield from (method for spec in manifest.methods for method in spec)
    yield from _texts(card.get("tags"))
    yield from _texts(card.get("language"))
    yield from (f"dataset:{name}" for name in _texts(card.get("datasets")))
    yield from (f"license:{name}" for name in _texts(card.get("license")))
    is_adapter = bool(config) or manifest is not None
    for name in dict.fromkeys(_backbones(card, config, manifest)):
        yield f"base_model:{name}"
        relation = card.get("base_model_relation") or ("adapter" if is_adapter else None)
        if isinstance(relation, str):
            yield f"base_model:{relation}:{name}"


def _backbones(
    card: Mapping[str, Any], config: Mapping[str, Any], manifest: Manifest | None
) -> Iterator[str]:
    yield from _texts(card.get("base_model"))
    named = config.get("base_model_name_or_path")
    if isinstance(named, str) and named.count("/") <= 1:
        yield named
    if manifest is not None and "/" in manifest.backbone.id:
        yield manifest.backbone.id


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _texts(value: object) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str)]

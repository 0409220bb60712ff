"""The backbones that are here: in packages, in the Hub's cache, in folders; and some good ones.

Only names and configurations are read, so that a command can choose before it imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import constants

from adapterhub.backbones.find import PACKAGED
from adapterhub.backbones.gguf import PACKAGED_GGUF, packaged_file
from adapterhub.backbones.local_folders import package_folder, remembered_folders

ENCODER, LANGUAGE_MODEL, SEQ2SEQ = "encoder", "language model", "text to text"
PICTURES, PICTURES_WITH_TEXT, SOUND, SPEECH = "pictures", "pictures with text", "sound", "speech"


class GoodBackbone(NamedTuple):
    """A backbone to begin with: its Hub id, what it is for, and millions of parameters.

    `layers` are the parameters that compute, without the embedding of tokens: two operations for
    each of them and token are the time that a step takes.
    """

    id: str
    kind: str
    size: float
    layers: float


GOOD = (
    GoodBackbone("sentence-transformers/all-MiniLM-L6-v2", ENCODER, 22.7, 10.6),
    GoodBackbone("answerdotai/ModernBERT-base", ENCODER, 149, 110),
    GoodBackbone("FacebookAI/xlm-roberta-base", ENCODER, 278, 85),
    GoodBackbone("HuggingFaceTB/SmolLM2-135M-Instruct", LANGUAGE_MODEL, 135, 106),
    GoodBackbone("Qwen/Qwen2.5-0.5B-Instruct", LANGUAGE_MODEL, 494, 358),
    GoodBackbone("google/flan-t5-small", SEQ2SEQ, 77, 44),
    GoodBackbone("google/vit-base-patch16-224-in21k", PICTURES, 86, 86),
    GoodBackbone("HuggingFaceTB/SmolVLM-256M-Instruct", PICTURES_WITH_TEXT, 256, 228),
    GoodBackbone("facebook/wav2vec2-base", SOUND, 95, 94),
    GoodBackbone("openai/whisper-tiny", SPEECH, 38, 18),
)
"""Small ones first; the second encoder reads long texts, the third a hundred languages."""

# The kind of backbone that a kind of task model is made of; all others are made of encoders.
_KINDS = {
    "causal-lm": LANGUAGE_MODEL,
    "seq2seq": SEQ2SEQ,
    "image-classification": PICTURES,
    "image-text-to-text": PICTURES_WITH_TEXT,
    "audio-classification": SOUND,
    "speech-recognition": SPEECH,
}
# What the class of a checkpoint says about its kind; the first that occurs in its name.
_CLASSES = {
    "ForCausalLM": LANGUAGE_MODEL,
    "LMHeadModel": LANGUAGE_MODEL,
    "WhisperForConditionalGeneration": SPEECH,
    "ForCTC": SPEECH,
    "Wav2Vec2": SOUND,
    "Hubert": SOUND,
    "ForImageClassification": PICTURES,
    "ViT": PICTURES,
    "T5ForConditionalGeneration": SEQ2SEQ,
    "BartForConditionalGeneration": SEQ2SEQ,
    "MarianMTModel": SEQ2SEQ,
    "ForConditionalGeneration": PICTURES_WITH_TEXT,
    "ForMaskedLM": ENCODER,
    "Model": ENCODER,
    "ForPreTraining": ENCODER,
}


class FoundBackbone(NamedTuple):
    """A backbone that is here: what `--backbone` takes, its kind, bytes of weights, and where."""

    id: str
    kind: str
    bytes: int
    place: str


def found_backbones() -> list[FoundBackbone]:
    """List the backbones that can be loaded without a download, packaged ones first."""
    found: dict[str, FoundBackbone] = {}
    for each in (*_packaged(), *_cached(), *_folders()):
        found.setdefault(each.id, each)
    return list(found.values())


def default_backbone(task: str) -> tuple[str, str]:
    """Choose a backbone for a kind of task model: a good one that is here, else the smallest here.

    Returns:
        What `--backbone` takes, and where it is; the first good one of the kind, to be downloaded,
        if none is here.
    """
    kind = _KINDS.get(task, ENCODER)
    good = [each.id for each in GOOD if each.kind == kind]
    # A folder was somebody's trial as often as not: it is listed, and never chosen.
    here = {e.id: e for e in (*_packaged(), *_cached()) if e.kind == kind}
    chosen = next((here[name] for name in good if name in here), None) or min(
        here.values(), key=lambda each: each.bytes, default=None
    )
    return (chosen.id, chosen.place) if chosen else (good[0], "Hub")


def _packaged() -> Iterator[FoundBackbone]:
    for name, packaged in PACKAGED.items():
        if (place := package_folder(packaged.package)) is not None:
            yield from _found(name, place / packaged.folder, "installed")
    for name in PACKAGED_GGUF:
        if (file := packaged_file(name)) is not None:
            yield FoundBackbone(name, LANGUAGE_MODEL, file.stat().st_size, "installed")


def _cached() -> Iterator[FoundBackbone]:
    for repo in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        snapshots = sorted(repo.glob("snapshots/*/config.json"), key=lambda p: p.stat().st_mtime)
        name = "/".join(repo.name.split("--")[1:])
        for config in snapshots[-1:]:
            yield from _found(name, config.parent, "Hub cache")


def _folders() -> Iterator[FoundBackbone]:
    for folder in remembered_folders():
        yield from _found(folder, Path(folder), "folder")


def _found(name: str, folder: Path, place: str) -> Iterator[FoundBackbone]:
    """Yield the backbone of a folder that has a configuration and weights."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
        size = sum(file.stat().st_size for file in weights)
    except (OSError, ValueError, RecursionError):
        return
    if size and (kind := _kind(config)):
        yield FoundBackbone(name, kind, size, place)


def _kind(config: Any) -> str:
    """Return the kind of a checkpoint by the class that wrote it, or ""."""
    names = config.get("architectures") if isinstance(config, dict) else None
    name = str(names[0]) if isinstance(names, list) and names else ""
    return next((kind for part, kind in _CLASSES.items() if part in name), "")

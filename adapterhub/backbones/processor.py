"""The processor of a backbone: a tokenizer, or what turns pictures and sound into its inputs.

identity = sha256(settings of the image processor and the feature extractor)

An adapter is trained on what the processor returns: another size or another mean of the pixels
would change its inputs as much as another tokenizer. The identity has no names of classes, which
differ with the libraries that are installed, and no settings that are null or false, which later
versions of transformers may add. Tokenizers have an identity of their own (tokenizer.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from transformers import (
    FeatureExtractionMixin,
    ImageProcessingMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from adapterhub.config.options import is_neutral

_PROCESSOR = "_adapterhub_processor"
_PARTS = ("image_processor", "feature_extractor")
_NAMES = frozenset({"image_processor_type", "feature_extractor_type", "processor_class"})


def processor_options(auto: str) -> dict[str, Any]:
    """Return the options to load a processor with, so that it computes the same everywhere.

    `auto` is the name of an auto class of transformers.
    """
    # torchvision resizes to other values, and is used where it is installed.
    return {"backend": "pil"} if auto == "AutoImageProcessor" else {}


def tokenizer_of(processor: Any) -> PreTrainedTokenizerBase | None:
    """Return a processor's tokenizer, which it may be itself; None if it has none."""
    tokenizer = getattr(processor, "tokenizer", processor)
    return tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None


def remember_processor(model: PreTrainedModel, processor: Any) -> None:
    """Record the processor that is used with a model."""
    vars(model)[_PROCESSOR] = processor


def processor_identity(model: PreTrainedModel) -> str | None:
    """Return the identity of the processor that was recorded for a model, 64 hexadecimal digits.

    None: there is none, or it is a tokenizer.
    """
    settings = list(_settings(vars(model).get(_PROCESSOR)))
    if not settings:
        return None
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _settings(processor: Any) -> Iterator[dict[str, Any]]:
    parts = [processor, *(getattr(processor, name, None) for name in _PARTS)]
    for part in parts:
        if isinstance(part, ImageProcessingMixin | FeatureExtractionMixin):
            facts = json.loads(part.to_json_string()).items()
            yield {k: v for k, v in facts if k not in _NAMES and not is_neutral(v)}

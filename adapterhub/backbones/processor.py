"""The processor of a backbone: a tokenizer, or what turns pictures and sound into its inputs.

identity = sha256(settings of the image processor and the feature extractor)

An adapter is trained on what the processor returns: another size or another mean of the pixels
would change its inputs as much as another tokenizer. The identity has no names of classes, which
differ with the libraries that are installed, and no settings that are null or false, which later
versions of transformers may add. Tokenizers have an identity of their own (tokenizer.py).
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import (
    FeatureExtractionMixin,
    ImageProcessingMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from adapterhub.config.options import is_neutral

if TYPE_CHECKING:
    from torch import Tensor

SOUND_INPUTS = ("input_values", "input_features")
"""What models of sound read: samples or a spectrogram."""

_PROCESSOR = "_adapterhub_processor"
_PARTS = ("image_processor", "feature_extractor")
_SHORTEST = 0.1  # seconds: the convolutions of speech encoders need 25 ms of sound
_AST_FRAMES = 100  # a second
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


def processor_of(model: PreTrainedModel) -> Any:
    """Return the processor that was recorded for a model; None: there is none."""
    return vars(model).get(_PROCESSOR)


def sampling_rate(processor: Any) -> int:
    """Return the samples of a second that a processor of sound reads."""
    return int(_extractor(processor).sampling_rate)


def heard_seconds(processor: Any) -> float | None:
    """Return the duration of which a processor makes inputs of one size, cut or padded to it.

    None: inputs are as long as the sounds.
    """
    from transformers import ASTFeatureExtractor  # imports libraries of sound

    extractor = _extractor(processor)
    if isinstance(extractor, ASTFeatureExtractor):
        return float(extractor.max_length) / _AST_FRAMES
    samples = getattr(extractor, "n_samples", None)
    return None if samples is None else float(samples) / sampling_rate(extractor)


def sound_inputs(processor: Any, sounds: Sequence[np.ndarray[Any, Any]]) -> dict[str, Tensor]:
    """Make model inputs of sounds, padded to the longest or to the size that the processor has.

    Args:
        processor: a feature extractor, or a processor that has one.
        sounds: the samples of each sound, at its sampling rate: (samples,).
    """
    extractor, rate = _extractor(processor), sampling_rate(processor)
    least = round(_SHORTEST * rate)
    filled = [np.pad(sound, (0, max(0, least - len(sound)))) for sound in sounds]
    padding = inspect.signature(type(extractor).__call__).parameters.get("padding")
    pads = {"padding": True} if padding is not None and padding.default is False else {}
    return dict(extractor(filled, sampling_rate=rate, return_tensors="pt", **pads))


def frame_counts(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[int] | None:
    """Count the frames that a speech encoder computes of each sound, without those of its padding.

    None: the inputs do not show their padding, or the model does not tell.
    """
    counted = getattr(model, "_get_feat_extract_output_lengths", None)
    mask = inputs.get("attention_mask")
    if counted is None or mask is None:
        return None
    return [int(count) for count in counted(mask.sum(-1))]


def _extractor(processor: Any) -> Any:
    return getattr(processor, "feature_extractor", processor)


def processor_identity(model: PreTrainedModel) -> str | None:
    """Return the identity of the processor that was recorded for a model, 64 hexadecimal digits.

    None: there is none, or it is a tokenizer.
    """
    settings = list(_settings(processor_of(model)))
    if not settings:
        return None
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _settings(processor: Any) -> Iterator[dict[str, Any]]:
    parts = [processor, *(getattr(processor, name, None) for name in _PARTS)]
    for part in parts:
        if isinstance(part, ImageProcessingMixin | FeatureExtractionMixin):
            facts = json.loads(part.to_json_string()).items()
            yield {k: v for k, v in facts if k not in _NAMES and not is_neutral(v)}

"""The processor of a backbone: a tokenizer, or what turns pictures and sound into its inputs.

identity = sha256(settings of the image processor and the feature extractor)

An adapter is trained on what the processor returns: another size or another mean of the pixels
would change its inputs as much as another tokenizer. The identity has no names of classes, which
differ with the libraries that are installed, and no settings that are null or false, which later
versions of transformers may add. Tokenizers have an identity of their own (tokenizer.py).

The classes in transformers of processors of pictures with text also have a part that reads videos,
which needs torchvision even where there are none. Here it is left out, and the image processor is
the one that computes with Pillow: its pixels are the same on every machine.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import transformers
from transformers import (
    FeatureExtractionMixin,
    ImageProcessingMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto import processing_auto
from transformers.utils.import_utils import DummyObject

from adapterhub.config.options import is_neutral
from adapterhub.errors import BackboneError, ConfigError

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

    Each sound has its samples at the sampling rate of the processor: (samples,).
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


"""Stands for the class below where the auto class of a processor is named."""

_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_OPTIONAL = ("video_processor", "feature_extractor", "audio_processor")


class PictureTextProcessor:
    """Loads the processor of a checkpoint, as an auto class of transformers does."""

    @staticmethod
    def from_pretrained(folder: Path, **options: Any) -> ProcessorMixin:
        """Load the image processor and the tokenizer of a folder, and join them.

        `options` are those of both parts.

        Raises:
            BackboneError: the checkpoint has no such processor.
            ConfigError: a library is missing.
        """
        own = _processor_class(folder)
        parts = own.get_attributes()
        if not {"tokenizer", "image_processor"} <= set(parts):
            raise BackboneError(
                f"{own.__name__} of {folder.name} has the parts {', '.join(parts)}",
                expected="a processor with a tokenizer and an image processor",
            )
        settings, _ = own.get_processor_dict(folder)
        settings = {name: value for name, value in settings.items() if name not in parts}
        given = [None if name in _OPTIONAL else _part(name, folder, options) for name in parts]
        try:
            processor = for_pictures(own).from_args_and_dict(given, settings)
        except ImportError as error:
            raise ConfigError(
                f"{own.__name__} needs a library: {' '.join(str(error).split())}",
                hint="install it, and run the command again",
            ) from error
        return processor  # type: ignore[no-any-return]


def image_placeholder(processor: Any) -> str | None:
    """Return what stands for a picture in a text; None if the processor has no such token."""
    return (
        getattr(processor, "image_token", None) if hasattr(processor, "image_processor") else None
    )


def picture_inputs(
    processor: Any,
    pictures: Sequence[Sequence[Any]],
    texts: Sequence[str],
    *,
    tensors: bool = True,
    special: bool = True,
) -> dict[str, Any]:
    """Return what a processor makes of texts that have a placeholder for each picture.

    `pictures` has those of each text. The inputs are tensors, padded to the longest text, or lists.
    `special` adds the special tokens of the tokenizer.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of numpy, in code of transformers
        made = processor(
            images=[list(some) for some in pictures],
            text=list(texts),
            add_special_tokens=special,
            return_tensors="pt" if tensors else None,
            padding=tensors,
        )
    return {name: values for name, values in made.items() if name != "labels"}


def learns_suffix(processor: Any) -> bool:
    """Return whether the processor marks the text to learn as the second part, as PaliGemma's."""
    return "suffix" in inspect.signature(type(processor).__call__).parameters


def _part(name: str, folder: Path, options: dict[str, Any]) -> Any:
    if name == "image_processor":
        return transformers.AutoImageProcessor.from_pretrained(folder, backend="pil", **options)
    return transformers.AutoTokenizer.from_pretrained(folder, **options)


def _processor_class(folder: Path) -> Any:
    """Return the class that a checkpoint names, or that of its type of model."""
    names = []
    for file in _FILES:
        path = folder / file
        named = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        names.append(named.get("processor_class") if isinstance(named, dict) else None)
    if not any(names):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        known: Any = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
        names.append(known.get(config.model_type))
    classes = [getattr(transformers, name, None) for name in names if isinstance(name, str)]
    found = next((c for c in classes if isinstance(c, type)), None)
    if isinstance(found, DummyObject):  # stands for a class whose libraries are not installed
        raise ConfigError(
            f"{found.__name__} of transformers needs {' and '.join(found._backends)}",
            hint=f"pip install {' '.join(found._backends)}",
        )
    if found is None or not issubclass(found, ProcessorMixin):
        raise BackboneError(
            f"{folder.name} has no processor for pictures with text",
            expected="a checkpoint with processor_config.json or preprocessor_config.json",
        )
    return found


def for_pictures(own: type[ProcessorMixin]) -> Any:
    """Return a class of processors without the parts that read no pictures.

    Its constructor takes what that of `own` takes, with None for these parts.
    """
    parts = [name for name in own.get_attributes() if name not in _OPTIONAL]
    absent: dict[str, Any] = dict.fromkeys(set(own.get_attributes()) - set(parts))
    return type(own.__name__, (own,), {**absent, "get_attributes": classmethod(lambda cls: parts)})

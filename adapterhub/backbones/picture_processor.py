"""Processors of backbones that read pictures with text: an image processor and a tokenizer.

Their classes in transformers also have a part that reads videos, which needs torchvision even where
there are none. Here it is left out, and the image processor is the one that computes with Pillow:
its pixels are the same on every machine.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import ProcessorMixin
from transformers.models.auto import processing_auto
from transformers.utils.import_utils import DummyObject

from adapterhub.errors import BackboneError, ConfigError

PICTURES_WITH_TEXT = "PictureTextProcessor"
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

    Args:
        processor: the processor.
        pictures: the pictures of each text.
        texts: the texts.
        tensors: whether to return tensors, padded to the longest text; else lists.
        special: whether the tokenizer adds its special tokens.
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

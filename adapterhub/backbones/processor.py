"""The processor of a backbone: a tokenizer, an image processor or an audio feature extractor.

identity = sha256(settings of the image processor and the feature extractor)

An adapter is trained on the outputs of the processor. Another image size or pixel mean would change
its inputs as much as another tokenizer. The identity leaves out class names, which differ with the
installed libraries, and settings that are null or false, which later versions of transformers may
add. Tokenizers have a separate identity.

In transformers, image-text processors also have a part that reads videos. It needs torchvision,
even if no videos are read. Here it is left out, and the image processor uses Pillow: its pixels are
the same on every machine.

The identity of a tokenizer, and the tokens added to it:

    identity = sha256(vocabulary, merges, special tokens, the ids of a probe text)

The probe text covers normalization and splitting, which transformers versions serialize
differently. The identity leaves out tokens added after the backbone was loaded, the padding token,
which many backbones lack, and the chat template.

transformers and tokenizers lack a function that removes added tokens. A fast tokenizer is reloaded
in place from its serialization without them. It keeps its model, because the numbers of a Unigram
model lose their last bit when they are parsed. Added tokens have consecutive ids, so only the last
ones can be removed: others would get new ids.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import transformers
from tokenizers import AddedToken, Tokenizer
from transformers import (
    FeatureExtractionMixin,
    ImageProcessingMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto import processing_auto
from transformers.utils.import_utils import DummyObject

from adapterhub.anatomy.backbone import Backbone
from adapterhub.config.options import is_neutral
from adapterhub.errors import AttachError, BackboneError, ConfigError, MismatchError

if TYPE_CHECKING:
    from torch import Tensor


SOUND_INPUTS = ("input_values", "input_features")
"""Inputs of audio models: samples or a spectrogram."""

_PARTS = ("image_processor", "feature_extractor")
_SHORTEST = 0.1  # seconds: the convolutions of speech encoders need 25 ms of audio
_AST_FRAMES = 100  # per second
_NAMES = frozenset({"image_processor_type", "feature_extractor_type", "processor_class"})


def processor_options(auto: str) -> dict[str, Any]:
    """Return the loading options that make a processor compute the same on every machine.

    `auto` is the name of an auto class of transformers.
    """
    # torchvision would be used if installed, and resizes to other values.
    return {"backend": "pil"} if auto == "AutoImageProcessor" else {}


def tokenizer_of(processor: Any) -> PreTrainedTokenizerBase | None:
    """Return a processor's tokenizer, or the processor if it is one; None if it lacks one."""
    tokenizer = getattr(processor, "tokenizer", processor)
    return tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None


def sampling_rate(processor: Any) -> int:
    """Return the sampling rate of an audio processor, in samples per second."""
    return int(_extractor(processor).sampling_rate)


def heard_seconds(processor: Any) -> float | None:
    """Return the duration in seconds to which a processor cuts or pads all audio.

    None: inputs are as long as the audio.
    """
    from transformers import ASTFeatureExtractor  # imports audio libraries

    extractor = _extractor(processor)
    if isinstance(extractor, ASTFeatureExtractor):
        return float(extractor.max_length) / _AST_FRAMES
    samples = getattr(extractor, "n_samples", None)
    return None if samples is None else float(samples) / sampling_rate(extractor)


def sound_inputs(processor: Any, sounds: Sequence[np.ndarray[Any, Any]]) -> dict[str, Tensor]:
    """Make model inputs from audio, padded to the longest or to the size of the processor.

    Each sound is an array of samples, (samples,), at the sampling rate of the processor.
    """
    extractor, rate = _extractor(processor), sampling_rate(processor)
    least = round(_SHORTEST * rate)
    filled = [np.pad(sound, (0, max(0, least - len(sound)))) for sound in sounds]
    padding = inspect.signature(type(extractor).__call__).parameters.get("padding")
    pads = {"padding": True} if padding is not None and padding.default is False else {}
    return dict(extractor(filled, sampling_rate=rate, return_tensors="pt", **pads))


def frame_counts(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[int] | None:
    """Count the frames that a speech encoder computes for each sound, without padding.

    None: the inputs do not mark their padding, or the model cannot count frames.
    """
    counted = getattr(model, "_get_feat_extract_output_lengths", None)
    mask = inputs.get("attention_mask")
    if counted is None or mask is None:
        return None
    return [int(count) for count in counted(mask.sum(-1))]


def _extractor(processor: Any) -> Any:
    return getattr(processor, "feature_extractor", processor)


def processor_identity(processor: Any) -> str | None:
    """Return the identity of a processor, 64 hexadecimal digits.

    None: there is no processor, or it is a tokenizer.
    """
    settings = list(_settings(processor))
    if not settings:
        return None
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _settings(processor: Any) -> Iterator[dict[str, Any]]:
    parts = [processor, *(getattr(processor, name, None) for name in _PARTS)]
    for part in parts:
        if isinstance(part, ImageProcessingMixin | FeatureExtractionMixin):
            facts = json.loads(part.to_json_string()).items()
            yield {k: v for k, v in facts if k not in _NAMES and not is_neutral(v)}


_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_OPTIONAL = ("video_processor", "feature_extractor", "audio_processor")


class PictureTextProcessor:
    """Loads the processor of a checkpoint, as an auto class of transformers does."""

    @staticmethod
    def from_pretrained(folder: Path, **options: Any) -> ProcessorMixin:
        """Load the image processor and the tokenizer of a folder, and join them.

        `options` are passed to both parts.

        Raises:
            BackboneError: the checkpoint lacks such a processor.
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
        own_parts = [None if name in _OPTIONAL else _part(name, folder, options) for name in parts]
        try:
            processor = for_pictures(own).from_args_and_dict(own_parts, settings)
        except ImportError as error:
            raise ConfigError(
                f"{own.__name__} needs a library: {' '.join(str(error).split())}",
                hint="install it, and run the command again",
            ) from error
        return processor  # type: ignore[no-any-return]


def image_placeholder(processor: Any) -> str | None:
    """Return the placeholder token of an image in a text; None if the processor lacks one."""
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
    """Make model inputs from texts that have a placeholder for each image.

    `pictures` has the images of each text. The inputs are tensors, padded to the longest text, or
    lists. `special` adds the special tokens of the tokenizer.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from numpy, in transformers' code
        batch = processor(
            images=[list(some) for some in pictures],
            text=list(texts),
            add_special_tokens=special,
            return_tensors="pt" if tensors else None,
            padding=tensors,
        )
    return {name: values for name, values in batch.items() if name != "labels"}


def learns_suffix(processor: Any) -> bool:
    """Return whether the processor takes the text to learn as a second part, like PaliGemma's."""
    return "suffix" in inspect.signature(type(processor).__call__).parameters


def _part(name: str, folder: Path, options: dict[str, Any]) -> Any:
    if name == "image_processor":
        return transformers.AutoImageProcessor.from_pretrained(folder, backend="pil", **options)
    return transformers.AutoTokenizer.from_pretrained(folder, **options)


def _processor_class(folder: Path) -> Any:
    """Return the processor class that a checkpoint names, or the class for its model type."""
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
    own = next((c for c in classes if isinstance(c, type)), None)
    if isinstance(own, DummyObject):  # stands for a class whose libraries are not installed
        raise ConfigError(
            f"{own.__name__} of transformers needs {' and '.join(own._backends)}",
            hint=f"pip install {' '.join(own._backends)}",
        )
    if own is None or not issubclass(own, ProcessorMixin):
        raise BackboneError(
            f"{folder.name} has no processor for images with text",
            expected="a checkpoint with processor_config.json or preprocessor_config.json",
        )
    return own


def for_pictures(own: type[ProcessorMixin]) -> Any:
    """Return a processor class without the parts that do not read images.

    Its constructor takes the arguments of `own`, with None for these parts.
    """
    parts = [name for name in own.get_attributes() if name not in _OPTIONAL]
    absent: dict[str, Any] = dict.fromkeys(set(own.get_attributes()) - set(parts))
    return type(own.__name__, (own,), {**absent, "get_attributes": classmethod(lambda cls: parts)})


_SPECIAL = ("bos", "eos", "unk", "sep", "cls", "mask")
# Case, accents, digits, contractions, repeated spaces, code, other scripts, an emoji.
_PROBE = (
    "Zürich's naïve Café — don't pay 12345.67€ or 007!  \tdef f(x):\n\n    return x**2  # ok?",
    "\u4f60\u597d\u3002 \u041f\u0440\u0438\u0432\u0435\u0442 "
    "\u0645\u0631\u062d\u0628\u0627 \U0001f642 \ufb01 \uff12 A\u0301",
)


@dataclass(eq=False)
class BorrowedTokenizer:
    """The changes that adapters made to a tokenizer, which models may share.

    `tokens` has the contents of tokens that adapters added. `templates` has the chat template of
    each model, by a key of the model; the last one is shown. `own` keeps the user's chat template
    meanwhile.
    """

    tokens: list[str] = field(default_factory=list)
    templates: dict[object, str] = field(default_factory=dict)
    own: Any = None


_BORROWED: WeakKeyDictionary[PreTrainedTokenizerBase, BorrowedTokenizer] = WeakKeyDictionary()


class TokenizerSnapshot:
    """A model's tokenizer and its state at its first use with the model.

    Tokens with ids from `size` on were added later, or have no embedding in the checkpoint.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        self.tokenizer = tokenizer
        self.size = size
        # Encoded now, because a token added later may match in the probe text.
        with _kept_settings(tokenizer):
            self.probe = [tokenizer.encode(text, add_special_tokens=False) for text in _PROBE]
        self.borrowed = _BORROWED.setdefault(tokenizer, BorrowedTokenizer())
        self._cached: tuple[object, str] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenizerSnapshot:
        # A copied model is used with the same tokenizer.
        return self

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields)
        self.borrowed = _BORROWED.setdefault(self.tokenizer, self.borrowed)  # a model was unpickled

    def identity(self, first_new: int | None = None) -> str:
        """Compute the identity of the tokenizer without new tokens, 64 hexadecimal digits.

        `first_new` is the lowest id of an adapter's new tokens, if that is below `size`.
        """
        size = self.size if first_new is None else min(self.size, first_new)
        special = {name: getattr(self.tokenizer, f"{name}_token", None) for name in _SPECIAL}
        key = (size, len(self.tokenizer), tuple(map(str, special.values())))
        if self._cached is None or self._cached[0] != key:
            vocabulary = self.tokenizer.get_vocab()
            original = sorted(pair for pair in vocabulary.items() if pair[1] < size)
            names = {name: str(token) for name, token in special.items() if token is not None}
            facts = [original, _merges(self.tokenizer), names, self.probe]
            self._cached = key, hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        return self._cached[1]

    def chat_template(self) -> str | None:
        """Return the user's chat template, the default one of several; None if not set."""
        template = self.borrowed.own if self._shows_an_adapters() else self.tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def new_tokens(self) -> list[tuple[int, AddedToken]]:
        """List the added tokens with their ids, sorted by id."""
        tokens = self.tokenizer.added_tokens_decoder.items()
        return sorted(((i, t) for i, t in tokens if i >= self.size), key=lambda pair: pair[0])

    def add(self, tokens: Sequence[tuple[int, AddedToken]]) -> None:
        """Add an adapter's tokens with these ids to the tokenizer; skip tokens that it has.

        Raises:
            MismatchError: a token has or would get another id, or could not be removed again. Then
                no token is added.
        """
        missing = self._missing(tokens)
        if not missing:
            return
        check_removable(self.tokenizer)
        contents = [token.content for token in missing.values()]
        try:
            self.borrowed.tokens += contents
            self.tokenizer.add_tokens(list(missing.values()))
            vocabulary = self.tokenizer.get_vocab()
            wrong = [
                f"{content!r}: {vocabulary.get(content)}, the adapter has {i}"
                for i, content in zip(missing, contents, strict=True)
                if vocabulary.get(content) != i
            ]
            if wrong:
                raise _different_ids(wrong)
        except BaseException:
            self.remove_unused(in_use=set(self.borrowed.tokens) - set(contents))
            raise

    def _missing(self, tokens: Sequence[tuple[int, AddedToken]]) -> dict[int, AddedToken]:
        """Return the tokens to add, by id.

        Raises:
            MismatchError: a token has or would get another id.
        """
        vocabulary = self.tokenizer.get_vocab()
        free = max(vocabulary.values(), default=-1) + 1
        missing = {i: token for i, token in tokens if token.content not in vocabulary}
        wrong = [
            f"{token.content!r}: {vocabulary[token.content]}, the adapter has {i}"
            for i, token in tokens
            if vocabulary.get(token.content, i) != i
        ]
        wrong += [
            f"{token.content!r}: would be {free + n}, the adapter has {i}"
            for n, (i, token) in enumerate(missing.items())
            if free + n != i
        ]
        if wrong:
            raise _different_ids(wrong)
        return missing

    def remove_unused(self, in_use: Collection[str]) -> None:
        """Remove the tokens that adapters added, from the last one to the first one in use.

        They stay if a later token, from the user or an adapter, would get another id.
        """
        vocabulary = self.tokenizer.get_vocab()
        brought = {content for content in self.borrowed.tokens if content not in in_use}
        by_id = sorted(vocabulary.items(), key=lambda pair: -pair[1]) if brought else []
        removed = set(itertools.takewhile(brought.__contains__, (content for content, _ in by_id)))
        if removed:
            remove_added_tokens(self.tokenizer, removed)
        gone = brought - vocabulary.keys() | removed
        self.borrowed.tokens = [c for c in self.borrowed.tokens if c not in gone]

    def show(self, key: object, template: str | None) -> None:
        """Set the chat template of a model on the tokenizer, until another one applies.

        Without an adapter's template, the user's template applies. `key` identifies the model.
        """
        if template == self.borrowed.templates.get(key):
            return  # a template that the user has set since then stays
        self._hide(key)
        if template is None:
            return
        if not self._shows_an_adapters():
            self.borrowed.templates.clear()  # the user has replaced them
            self.borrowed.own = self.tokenizer.chat_template
        self.borrowed.templates[key] = template
        self.tokenizer.chat_template = template

    def _hide(self, key: object) -> None:
        """Restore the template before a model's; a template set by the user since then stays."""
        borrowed = self.borrowed
        if self._shows_an_adapters():
            others = [template for k, template in borrowed.templates.items() if k != key]
            self.tokenizer.chat_template = others[-1] if others else borrowed.own
        borrowed.templates.pop(key, None)
        if not borrowed.templates:
            borrowed.own = None

    def _shows_an_adapters(self) -> bool:
        """Return whether the tokenizer has the last adapter's template, not the user's."""
        templates = list(self.borrowed.templates.values())
        return bool(templates) and self.tokenizer.chat_template == templates[-1]


def _different_ids(wrong: Sequence[str]) -> MismatchError:
    return MismatchError(
        "the adapter's new tokens have different ids in this tokenizer",
        offenders=wrong,
        expected="the tokenizer of the backbone, with no other tokens added",
        hint="model, tokenizer = load_backbone(...), or detach the adapters with the other tokens",
    )


@contextmanager
def _kept_settings(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Restore the settings of a tokenizer's backend, which each encoding resets."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        yield
        return
    truncation, padding = backend.truncation, backend.padding
    encode_special_tokens = backend.encode_special_tokens
    try:
        yield
    finally:
        backend.encode_special_tokens = encode_special_tokens
        if truncation:
            backend.enable_truncation(**truncation)
        if padding:
            backend.enable_padding(**padding)


def _merges(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """List the merges of a BPE in order; versions serialize a pair as a list or with a space."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return []
    merges = json.loads(backend.to_str())["model"].get("merges") or []
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]


def snapshot_of(
    backbone: Backbone, tokenizer: PreTrainedTokenizerBase, size: int
) -> TokenizerSnapshot:
    """Return the recorded snapshot of a tokenizer for a backbone, or take a new one.

    `size` is the number of token ids that belong to the backbone.

    Raises:
        AttachError: `tokenizer` is not a transformers tokenizer.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise AttachError(
            f"{type(tokenizer).__name__} is not a tokenizer", expected="a transformers tokenizer"
        )
    snapshot: TokenizerSnapshot | None = backbone.tokenizer
    if snapshot is None or snapshot.tokenizer is not tokenizer:
        snapshot = TokenizerSnapshot(tokenizer, size)
    return snapshot


def check_removable(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer if added tokens could not be removed again.

    Raises:
        MismatchError: a part of the tokenizer cannot be serialized, or changes when reloaded.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    try:
        text = backend.to_str()
        copied = Tokenizer.from_str(text)
        copied.model = backend.model
        problem = "" if copied.to_str() == text else "it is not read back as it was written"
    except Exception as error:  # tokenizers does not raise a narrower class
        problem = str(error)
    if problem:
        raise MismatchError(
            "new tokens could not be removed again from this tokenizer",
            offenders=[problem],
            expected="a tokenizer whose parts can be saved",
            hint="add the adapter's tokens yourself: tokenizer.add_tokens([...])",
        )


def remove_added_tokens(tokenizer: PreTrainedTokenizerBase, contents: Collection[str]) -> None:
    """Remove the last added tokens of a tokenizer, and restore its state before them.

    The tokens must not be in the vocabulary of its model, and no other token may have a higher id.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        _remove_from_python(tokenizer, contents)
        return
    parts = json.loads(backend.to_str())
    parts["added_tokens"] = [t for t in parts["added_tokens"] if t["content"] not in contents]
    model, encodes_special = backend.model, backend.encode_special_tokens
    backend.__setstate__(json.dumps(parts).encode())
    backend.model = model
    backend.encode_special_tokens = encodes_special  # not part of the serialization


def _remove_from_python(tokenizer: Any, contents: Collection[str]) -> None:
    """Remove tokens from the attributes of a tokenizer that is written in Python."""
    for content in contents:
        tokenizer._added_tokens_decoder.pop(tokenizer._added_tokens_encoder.pop(content, None), 0)
        if content in tokenizer.tokens_trie._tokens:
            tokenizer.tokens_trie._tokens.remove(content)
            _prune(tokenizer.tokens_trie.data, content)
    tokenizer._extra_special_tokens[:] = [
        token for token in tokenizer._extra_special_tokens if str(token) not in contents
    ]
    tokenizer._update_total_vocab_size()


def _prune(trie: dict[str, Any], word: str) -> None:
    """Remove a word from a trie, and the branches that no other word needs."""
    path = [trie]
    for character in word:
        path.append(path[-1][character])
    path[-1].pop("", None)
    for node, character in zip(reversed(path[:-1]), reversed(word), strict=True):
        if node[character]:
            return
        del node[character]

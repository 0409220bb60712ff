"""A model of every type in transformers: tiny and random, or without weights; and inputs for it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
import transformers
from shrink import Options, shallow_options, small_options
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

AUTO = (
    "AutoModelForSequenceClassification",
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModel",
)
# The classes that people adapt, in the order in which one is chosen for a type.
ADAPTED = (
    "AutoModelForImageTextToText",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForCTC",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModelForSequenceClassification",
    "AutoModelForAudioClassification",
    "AutoModel",
)
TYPES = tuple(CONFIG_MAPPING)
FEW_PARAMETERS = 2_000_000  # of a tiny model, if its type can be as small
MOST_PARAMETERS = 5_000_000
VANISHING = 1e-6


def build(model_type: str, auto: str, tiny: bool = False) -> PreTrainedModel | None:
    """Build a model from its default configuration, with few layers where that is possible.

    None if transformers has no such class, or cannot build it: some need a package that is not
    installed, or options without a default. Also if it cannot be made small.

    Args:
        model_type: a type of configuration.
        auto: an auto class.
        tiny: a random model with small sizes on the CPU; otherwise one on the meta device.
    """
    mapping = getattr(transformers, auto)._model_mapping
    if CONFIG_MAPPING[model_type] not in mapping:
        return None
    try:
        default = CONFIG_MAPPING[model_type]()
    except Exception:  # whatever a type of transformers raises
        return None
    if tiny:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of empty parameters, for one
            return _tiny(model_type, auto, default)
    for options in (shallow_options(default), {}):
        with contextlib.suppress(Exception):
            return _on_meta(model_type, auto, options)
    return None


def _tiny(model_type: str, auto: str, default: PreTrainedConfig) -> PreTrainedModel | None:
    """Build a random model with the first options that are small enough."""
    sizes: dict[int, Options] = {}
    for options in small_options(default):
        with contextlib.suppress(Exception):
            model = _on_meta(model_type, auto, options)
            sizes[sum(p.numel() for p in model.parameters())] = options
            if min(sizes) < FEW_PARAMETERS:
                break
    if not sizes or min(sizes) > MOST_PARAMETERS:
        return None
    config = CONFIG_MAPPING[model_type](**sizes[min(sizes)])
    try:
        model: PreTrainedModel = getattr(transformers, auto).from_config(config).eval()
    except Exception:  # what is computed from weights while it is built
        return None
    _redraw_vanishing(model)
    return model


@torch.no_grad()
def _redraw_vanishing(model: PreTrainedModel) -> None:
    """Give values to matrices that are zero, or near: what is behind them would not count.

    NeoMME starts with outputs of zero in each sublayer, SAM with weights of 1e-10.
    """
    for module in model.modules():
        weight = module._parameters.get("weight")
        projects = isinstance(module, torch.nn.Linear | torch.nn.Conv2d) and weight is not None
        if projects and weight.is_floating_point() and bool((weight.abs() < VANISHING).all()):
            weight.normal_(std=0.02)


def _on_meta(model_type: str, auto: str, options: Options) -> PreTrainedModel:
    config = CONFIG_MAPPING[model_type](**options)
    with torch.device("meta"):
        return getattr(transformers, auto).from_config(config).eval()


def autos(model_type: str, among: tuple[str, ...] = AUTO) -> list[str]:
    """List the auto classes that transformers has for a type."""
    return [
        auto
        for auto in among
        if CONFIG_MAPPING[model_type] in getattr(transformers, auto)._model_mapping
    ]


def every_model(
    types: tuple[str, ...] = (), tiny: bool = False
) -> Iterator[tuple[str, str, PreTrainedModel]]:
    """Yield (model type, auto class, model) for each class that can be built."""
    for model_type in types or TYPES:
        classes = set()
        for auto in AUTO:
            model = build(model_type, auto, tiny)
            if model is not None and type(model) not in classes:
                classes.add(type(model))
                yield model_type, auto, model

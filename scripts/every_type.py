"""A model of every type in transformers: tiny and random, or without weights; and inputs for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
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
MOST_LAYERS = 6
MOST_PARAMETERS = 2_000_000  # of a tiny model
VOCAB = 96
_DEPTH = re.compile(r"num_(hidden_|encoder_|decoder_)?layers|n_layers?|(encoder|decoder)_layers")
# Patterns of sizes in configurations, and a small value; the first that matches counts.
_SIZES = {
    r"num_(key_value|kv)_heads": 2,
    r".*(num_heads|attention_heads|n_heads?)": 4,
    r"head_dim|d_kv|qk_.*head_dim|v_head_dim": 8,
    r"hidden_size|d_model|n_embd|emb_dim|dim|embedding_size|embed_dim|word_embed_proj_dim": 32,
    r".*intermediate_size|.*ffn_dim|d_ff|n_inner|ffn_hidden_size|hidden_dim": 48,
    r"vocab_size|n_words": VOCAB,
    r"(num|n|num_local|n_routed)_experts": 4,
    r"num_experts_per_tok": 2,
}


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
    for options in (_tiny,) if tiny else (_shallow, _default):
        try:
            config = CONFIG_MAPPING[model_type](**options(CONFIG_MAPPING[model_type]()))
            with torch.device("meta"):
                model = getattr(transformers, auto).from_config(config).eval()
            if not tiny:
                return model
            if sum(p.numel() for p in model.parameters()) < MOST_PARAMETERS:
                return getattr(transformers, auto).from_config(config).eval()
        except Exception:  # whatever a configuration or model of transformers raises
            continue
    return None


def autos(model_type: str, among: tuple[str, ...] = AUTO) -> list[str]:
    """List the auto classes that transformers has for a type."""
    return [
        auto
        for auto in among
        if CONFIG_MAPPING[model_type] in getattr(transformers, auto)._model_mapping
    ]


def _default(config: PreTrainedConfig) -> dict[str, Any]:
    return {}


def _shallow(config: PreTrainedConfig) -> dict[str, Any]:
    return _changed(config, {_DEPTH.pattern: MOST_LAYERS})


def _tiny(config: PreTrainedConfig) -> dict[str, Any]:
    tokens = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 3, "num_labels": 3}
    return _changed(config, {_DEPTH.pattern: MOST_LAYERS} | _SIZES) | tokens


def _changed(config: PreTrainedConfig, sizes: dict[str, int]) -> dict[str, Any]:
    """Return options with smaller numbers, of the parts of a configuration too."""
    options: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            if deeper := _changed(part, sizes):
                options[name] = {"model_type": part.model_type} | deeper
        elif isinstance(value, int) and not isinstance(value, bool):
            small = next((n for p, n in sizes.items() if re.fullmatch(p, name)), value)
            if small < value:
                options[name] = small
    return options


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

"""Small sizes for the configuration of any model type of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tiny_overrides import OVERRIDES
from transformers import PreTrainedConfig

MOST_LAYERS = 6
VOCAB = 96
Options = dict[str, Any]

_DEPTH = r"num_(hidden_|encoder_|decoder_)?layers|n_layers?|(encoder|decoder)_layers"
# Patterns of sizes in configurations, and a small value; the first that matches counts.
_SIZES = {
    r"num_(key_value|kv)_heads": 2,
    r".*(num_heads|attention_heads|n_heads?)": 4,
    r"head_dim|d_kv|qk_.*head_dim|v_head_dim": 8,
    r"rotary_dim": 4,
    r"hidden_size|d_model|n_embd|emb_dim|dim|embedding_size|embed_dim|word_embed_proj_dim": 32,
    r".*intermediate_size|.*ffn_dim|d_ff|n_inner|ffn_hidden_size|hidden_dim": 48,
    r"vocab_size|n_words": VOCAB,
    r"(num|n|num_local|n_routed)_experts": 4,
    r"num_experts_per_tok": 2,
}
# Further ones, which some types do not accept.
_MORE_SIZES = {
    r"depth|num_(?!feat).*_layers": MOST_LAYERS,
    r"linear_num_key_heads": 2,
    r"linear_num_value_heads": 4,
    r".*head_dim": 8,
    r"(pad|bos|eos|decoder_start)_token_id": 1,
    r".*vocab_size": VOCAB,
    r".*hidden_size|.*output_dim|condition_dim|projector_input_dim|codebook_dim": 32,
    r"(num|n)_(routed_|shared_)?experts|moe_num_experts": 4,
    r"(q|kv|o)_lora_rank|index_topk": 16,
}
_WIDTHS = r".*hidden_sizes|embed_dims?|conv_dim|.*_dims|.*channels?|dims|widths"
_DEPTHS = r".*depths|num_blocks|.*layers|block_repeats|.*num_blocks"
# Values of options that a type needs and that have no default.
_FILLED = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "pad_token_id": 1,
    "vocab_size": VOCAB,
    "prediction_length": 4,
}


def small_options(config: PreTrainedConfig) -> Iterator[Options]:
    """Yield options for a small model of a type, the plainest first; a type may refuse some.

    Args:
        config: the default configuration of the type.
    """
    tokens = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 3, "num_labels": 3}
    own = OVERRIDES.get(config.model_type, {})
    plain = {_DEPTH: MOST_LAYERS} | _SIZES
    more = plain | _MORE_SIZES
    yield _merged(_changed(config, plain) | tokens, own)
    yield _merged(_changed(config, more, lists=True) | tokens, own)
    yield _merged(_changed(config, more, lists=True, filled=True) | tokens, own)


def shallow_options(config: PreTrainedConfig) -> Options:
    """Return options for few layers of the default size."""
    return _changed(config, {_DEPTH: MOST_LAYERS})


def _changed(
    config: PreTrainedConfig, sizes: dict[str, int], lists: bool = False, filled: bool = False
) -> Options:
    """Return options with smaller numbers, of the parts of a configuration too.

    Args:
        config: the configuration, or a part of it.
        sizes: patterns of names, and values.
        lists: whether lists get smaller too, where they have one value for each layer or stage.
        filled: whether to set options without a default.
    """
    options: Options = {}
    parts = vars(config)
    for name, value in config.to_dict().items():
        part = parts.get(name)
        if isinstance(part, PreTrainedConfig):
            if deeper := _changed(part, sizes, lists, filled):
                options[name] = {"model_type": part.model_type} | deeper
        elif isinstance(value, int) and not isinstance(value, bool):
            small = next((n for p, n in sizes.items() if re.fullmatch(p, name)), value)
            if small < value:
                options[name] = small
        elif lists and isinstance(value, (list, tuple)) and value:
            options |= _shorter(name, list(value))
        elif lists and name == "per_layer_config" and value:
            options[name] = _fewer(value)
        elif filled and value is None and name in _FILLED:
            options[name] = _FILLED[name]
    return options


def _shorter(name: str, values: list[Any]) -> Options:
    """Return a list with an entry for each of few layers, or with small numbers, if it is one."""
    numbers = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    if numbers and re.fullmatch(_WIDTHS, name) and max(values) > 48:
        return {name: [max(value // 8, 4) for value in values]}
    if numbers and re.fullmatch(_DEPTHS, name) and len(values) < MOST_LAYERS:
        return {name: [min(value, 2) for value in values]}
    if len(values) > MOST_LAYERS and re.fullmatch(r".*(layer|type)s?.*", name):
        return {name: values[:MOST_LAYERS]}
    return {}


def _fewer(layers: dict[Any, Options]) -> dict[int, Options]:
    """Return what differs in the first layers: twice a small size."""
    small = {"head_dim": 16, "num_key_value_heads": 4, "num_attention_heads": 8}
    return {
        int(number): {name: small.get(name, value) for name, value in each.items()}
        for number, each in layers.items()
        if int(number) < MOST_LAYERS
    }


def _merged(options: Options, own: Options) -> Options:
    """Return options with others on top, those of parts too."""
    merged = dict(options)
    for name, value in own.items():
        deeper = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if deeper else value
    return merged

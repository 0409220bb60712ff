"""The part of a configuration that changes what a backbone computes.

Two backbones with the same weights may compute different functions: with another activation, number
of heads, rope or epsilon of a norm.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

# They concern training, generation, the head or the outputs; or tensors of other shapes show them.
_WITHOUT_EFFECT = re.compile(
    r".*(dropout|pdrop|layerdrop).*|initializer_.*|init_std|.*_token_id|vocab_size|use_cache"
    r"|is_decoder|add_cross_attention|tie_word_embeddings|output_.*|router_(aux_loss_coef|jitter_noise)"
    r"|start_n_top|end_n_top|pretraining_tp|slow_but_exact|sparse_pred.*|deterministic_flash_attn"
    r"|max_position_embeddings|n_positions|ctc_(loss_reduction|zero_infinity)"
)
_BASE = frozenset(field.name for field in fields(PreTrainedConfig))


def function_config(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of a configuration that change what the backbone computes."""
    chosen: dict[str, Any] = {"model_type": config.model_type}
    names = [f.name for f in fields(config) if f.name not in _BASE]
    fields_of = vars(config)  # an option that differs between layers has no attribute to read
    for name in names:
        value = fields_of.get(name, getattr(type(config), name, None))
        if isinstance(value, PreTrainedConfig):
            chosen[name] = function_config(value)
        elif not _WITHOUT_EFFECT.fullmatch(name) or _has_effect(name, config):
            chosen[name] = _plain(value)
    if layers := config.to_dict().get("per_layer_config"):
        chosen["per_layer_config"] = _plain(layers)
    return chosen


def _has_effect(name: str, config: PreTrainedConfig) -> bool:
    """Return whether a length changes the function: that of a dynamic rope does."""
    rope = str(getattr(config, "rope_parameters", None))
    return name == "max_position_embeddings" and "dynamic" in rope


def _plain(value: Any) -> Any:
    """Convert a value to JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return value if value is None or is_number or isinstance(value, str) else str(value)


def config_differences(
    recorded: Mapping[str, Any], found: Mapping[str, Any], path: str = ""
) -> list[str]:
    """List the fields that both configurations have, with different values.

    Versions of transformers add and rename fields, so one that only one side has is no difference.

    Args:
        recorded: the configuration with which an adapter was trained.
        found: that of the model.
        path: of the fields, for the messages.
    """
    problems = []
    for name in sorted(recorded.keys() & found.keys()):
        before, now = recorded[name], found[name]
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            problems += config_differences(before, now, f"{path}{name}.")
        elif before != now:
            problems.append(f"{path}{name}: {now!r}, trained with {before!r}")
    return problems

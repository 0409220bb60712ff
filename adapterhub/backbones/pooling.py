"""The pooling and text length that a backbone was trained with.

sentence-transformers trains a backbone together with a pooling of the token states, and lists both
in `modules.json`. The pooler of such a checkpoint, a dense layer before the head, was not trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from adapterhub.anatomy.backbone import Backbone
from adapterhub.errors import unknown

OWN = "model"  # the pooling of the transformers class

_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
}
NAMES = {"cls": "cls", "mean": "mean", "lasttoken": "last", "max": "max"}
"""Poolings that heads can use, by their names in sentence-transformers."""

_MAX_BYTES = 64 << 10


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    weights = mask.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1).clamp(min=1)


def _max(states: Tensor, mask: Tensor) -> Tensor:
    return states.masked_fill(~mask.unsqueeze(-1), -torch.inf).amax(1)


def _first(states: Tensor, mask: Tensor) -> Tensor:
    return _at(states, mask.long().argmax(1))


def _last(states: Tensor, mask: Tensor) -> Tensor:
    return _at(states, mask.shape[1] - 1 - mask.flip(1).long().argmax(1))


def _at(states: Tensor, positions: Tensor) -> Tensor:
    return states[torch.arange(len(states), device=states.device), positions]


POOLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": _first,
    "mean": _mean,
    "last": _last,
    "max": _max,
}
"""Functions of states and mask, false at padding, to the pooled vectors (batch, d)."""
POOLINGS = tuple(POOLS)


def check_pooling(name: str) -> str:
    """Check the name of a pooling, and return it.

    Raises:
        ConfigError: the pooling is unknown.
    """
    if name not in (*POOLINGS, OWN):
        raise unknown("pooling", name, (*POOLINGS, OWN))
    return name


def trained_pooling(folder: Path) -> str | None:
    """Return the pooling that sentence-transformers recorded for a backbone.

    None if the folder lacks a record, or records another pooling or several. The record is a hint
    for a head, so a broken one is ignored. Vectors need all modules: see `sentence_modules.py`.
    """
    modules = json_or_none(folder / "modules.json")
    for module in modules if isinstance(modules, list) else ():
        if isinstance(module, dict) and str(module.get("type", "")).endswith(".Pooling"):
            path = str(module.get("path", ""))
            if path in ("", ".", "..") or Path(path).name != path:
                return None
            config = json_or_none(folder / path / "config.json")
            return _mode(config) if isinstance(config, dict) else None
    return None


def _mode(config: Mapping[str, Any]) -> str | None:
    """Return the single pooling of a configuration, from version 6 or from flags before it."""
    if "pooling_mode" in config:
        return NAMES.get(str(config["pooling_mode"]))
    chosen = [flag for flag, on in config.items() if flag.startswith("pooling_mode_") and on]
    return _MODES.get(chosen[0]) if len(chosen) == 1 else None


def json_or_none(path: Path) -> Any:
    """Read a small JSON file; return None if it is missing or broken."""
    try:
        with open(path, "rb") as file:
            return json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def remember_pooling(model: nn.Module, chosen: str | None, folder: Path) -> None:
    """Record the pooling for the heads of new adapters: the user's choice, or as trained."""
    backbone = Backbone.of(model)
    backbone.pooling = chosen
    backbone.trained_pooling = None if chosen else trained_pooling(folder)


_CONFIGS = tuple(  # in versions before 2, by the type of the transformer
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


def transformer_options(folder: Path) -> dict[str, Any]:
    """Return the options that sentence-transformers recorded for a transformer."""
    configs = (json_or_none(folder / name) for name in _CONFIGS)
    return next((each for each in configs if each and isinstance(each, dict)), {})


def trained_length(folder: Path) -> int | None:
    """Return the length that sentence-transformers recorded, in tokens, or None."""
    config = transformer_options(folder)
    of_tokenizer = config.get("tokenizer_args") or config.get("processor_kwargs")
    more = of_tokenizer.get("model_max_length") if isinstance(of_tokenizer, dict) else None
    lengths = (more, config.get("max_seq_length"))
    return next((n for n in lengths if isinstance(n, int) and n > 0), None)


def max_positions(model: nn.Module) -> int:
    """Return the maximum input length for the positions of the model, in tokens."""
    config = Backbone.of(model).config
    text = None if config is None else config.get_text_config(decoder=True)
    if not hasattr(config, "max_position_embeddings") and text is not config:
        return _recorded_positions(text)
    most = _recorded_positions(config)
    for name, module in model.named_modules():
        # RoBERTa's positions start after the padding index, so its table has fewer usable rows.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            padding = module.padding_idx
            most = min(most, module.num_embeddings - (0 if padding is None else padding + 1))
    return most


def _recorded_positions(config: Any) -> int:
    """Return the positions of a configuration; for an audio decoder, positions of its output."""
    names = ("max_position_embeddings", "max_target_positions")
    return next((n for name in names if (n := getattr(config, name, None))), 1 << 30)


def vector_length(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the length that texts are truncated to for their vectors, in tokens."""
    origin = Backbone.of(model).folder
    trained = trained_length(Path(origin)) if origin else None
    return min(tokenizer.model_max_length, max_positions(model), trained or 1 << 30)

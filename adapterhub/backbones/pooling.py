"""How a backbone was trained to make one vector of a text: its pooling, and the length of texts.

sentence-transformers trains a backbone together with a pooling of the token states, and lists both
in `modules.json`. The pooler of such a checkpoint, a dense layer in front of the head, was not
trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.anatomy.backbone import Backbone
from adapterhub.backbones.task_models import text_config
from adapterhub.errors import unknown

OWN = "model"  # the pooling of the transformers class

_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
}
NAMES = {"cls": "cls", "mean": "mean", "lasttoken": "last", "max": "max"}
"""The poolings of sentence-transformers that heads may read, by their names there."""

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
"""The pooled vector of each row, (batch, d), of its states and of its mask, false at padding."""
POOLINGS = tuple(POOLS)


def check_pooling(name: str) -> str:
    """Return the name of a pooling.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in (*POOLINGS, OWN):
        raise unknown("pooling", name, (*POOLINGS, OWN))
    return name


def trained_pooling(folder: Path) -> str | None:
    """Return the pooling that sentence-transformers recorded for a backbone.

    None if the folder has no such record, or one of another or of several poolings. The record is a
    hint for a head: a broken one is ignored. Vectors need all of it: `sentence_modules.py`.
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
    """Return the one pooling of a configuration: of version 6, or of those with one flag each."""
    if "pooling_mode" in config:
        return NAMES.get(str(config["pooling_mode"]))
    chosen = [flag for flag, on in config.items() if flag.startswith("pooling_mode_") and on]
    return _MODES.get(chosen[0]) if len(chosen) == 1 else None


def json_or_none(path: Path) -> Any:
    """Return what a small JSON file has; None if it is missing or broken."""
    try:
        with open(path, "rb") as file:
            return json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def remember_pooling(model: PreTrainedModel, chosen: str | None, folder: Path) -> None:
    """Record the pooling for the heads of new adapters: the user's, or that of the training."""
    backbone = Backbone.of(model)
    backbone.pooling = chosen
    backbone.trained_pooling = None if chosen else trained_pooling(folder)


_CONFIGS = tuple(  # of versions before 2, by the type of the transformer
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


def transformer_options(folder: Path) -> dict[str, Any]:
    """Return the options that sentence-transformers recorded for a transformer."""
    found = (json_or_none(folder / name) for name in _CONFIGS)
    return next((each for each in found if each and isinstance(each, dict)), {})


def trained_length(folder: Path) -> int | None:
    """Return the length that sentence-transformers recorded, in tokens, or None."""
    config = transformer_options(folder)
    of_tokenizer = config.get("tokenizer_args") or config.get("processor_kwargs")
    more = of_tokenizer.get("model_max_length") if isinstance(of_tokenizer, dict) else None
    given = (more, config.get("max_seq_length"))
    return next((n for n in given if isinstance(n, int) and n > 0), None)


def max_positions(model: PreTrainedModel) -> int:
    """Return the longest input that the model has positions for, in tokens."""
    config = text_config(model)
    if not hasattr(model.config, "max_position_embeddings") and config is not model.config:
        return _recorded_positions(config)
    most = _recorded_positions(model.config)
    for name, module in model.named_modules():
        # RoBERTa counts positions from the one behind its padding, in a table of as many rows.
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            padding = module.padding_idx
            most = min(most, module.num_embeddings - (0 if padding is None else padding + 1))
    return most


def _recorded_positions(config: Any) -> int:
    """Return the positions of a configuration; a decoder of sound has those of what it writes."""
    names = ("max_position_embeddings", "max_target_positions")
    return next((n for name in names if (n := getattr(config, name, None))), 1 << 30)


def vector_length(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the length at which texts are cut for their vectors, in tokens."""
    origin = Backbone.of(model).folder
    trained = trained_length(Path(origin)) if origin else None
    return min(tokenizer.model_max_length, max_positions(model), trained or 1 << 30)

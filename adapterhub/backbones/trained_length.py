"""How long a text may be: the positions of a model, and the length that it was trained with."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.backbones.identity import ORIGIN
from adapterhub.backbones.task_models import text_config

_CONFIG = "sentence_bert_config.json"


def trained_length(folder: Path) -> int | None:
    """Return the `max_seq_length` that sentence-transformers recorded, or None if there is none."""
    try:
        recorded = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))["max_seq_length"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return recorded if isinstance(recorded, int) and recorded > 0 else None


def max_positions(model: PreTrainedModel) -> int:
    """Return the longest input that the model has positions for, in tokens."""
    config = text_config(model)
    if not hasattr(model.config, "max_position_embeddings") and config is not model.config:
        return getattr(config, "max_position_embeddings", None) or 1 << 30
    most: int = getattr(model.config, "max_position_embeddings", None) or 1 << 30
    for name, module in model.named_modules():
        # RoBERTa counts positions from the one behind its padding, in a table of as many rows.
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            padding = module.padding_idx
            most = min(most, module.num_embeddings - (0 if padding is None else padding + 1))
    return most


def vector_length(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the length at which texts are cut for their vectors, in tokens."""
    origin = getattr(model, ORIGIN, None)
    trained = trained_length(Path(origin)) if origin else None
    return min(tokenizer.model_max_length, max_positions(model), trained or 1 << 30)

"""The token embedding of a model, and the vocabulary size of its checkpoint."""

from __future__ import annotations

import json

from torch import nn
from transformers import PreTrainedModel

from adapterhub.backbones.identity import origin_of

_ROWS = "_adapterhub_rows"


def token_embedding(model: PreTrainedModel) -> nn.Parameter | None:
    """Return the weight of the token embedding, (vocabulary, d); None if the model has none."""
    try:
        weight = model.get_input_embeddings().weight
    except (NotImplementedError, AttributeError):
        return None
    return weight if isinstance(weight, nn.Parameter) and weight.ndim == 2 else None


def remember_vocabulary_size(model: PreTrainedModel) -> None:
    """Record the number of rows of a token embedding as that of the checkpoint."""
    if (table := token_embedding(model)) is not None:
        setattr(model, _ROWS, table.shape[0])


def checkpoint_vocabulary_size(model: PreTrainedModel) -> int | None:
    """Return the number of rows of the checkpoint's token embedding, if known.

    The model's own may have been resized since.
    """
    rows: int | None = getattr(model, _ROWS, None)
    origin = origin_of(model)
    if rows is None and origin is not None and (origin / "config.json").is_file():
        config = json.loads((origin / "config.json").read_text(encoding="utf-8"))
        rows = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return rows

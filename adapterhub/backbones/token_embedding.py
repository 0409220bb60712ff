"""The token embedding of a model, and the vocabulary size of its checkpoint."""

from __future__ import annotations

import json

from torch import nn
from transformers import PreTrainedModel

from adapterhub.anatomy.own_modules import own_modules
from adapterhub.backbones.identity import origin_of

_ROWS = "_adapterhub_rows"


def token_embedding(model: PreTrainedModel) -> nn.Parameter | None:
    """Return the weight of the token embedding, (vocabulary, d); None if the model has none."""
    try:
        weight = model.get_input_embeddings().weight
    except (NotImplementedError, AttributeError):
        return None
    return weight if isinstance(weight, nn.Parameter) and weight.ndim == 2 else None


def token_tables(model: PreTrainedModel) -> list[tuple[nn.Module, str]]:
    """Return the modules that have a row for each token, and the name of their parameter.

    The token embedding, other embeddings that are tied to it, and an output layer.
    """
    if (table := token_embedding(model)) is None:
        return []
    output = model.get_output_embeddings()
    own = (module for _, module in own_modules(model))
    modules = [m for m in own if m is output or m._parameters.get("weight") is table]
    return [(m, "weight") for m in modules if m._parameters.get("weight") is not None]


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

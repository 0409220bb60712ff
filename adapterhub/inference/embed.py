"""Vectors of texts, of a model with any adapters: the Python side of the task `embedding`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapters.route import RouteRow, route
from adapterhub.backbones.identity import ORIGIN
from adapterhub.backbones.pooling import POOLS, trained_pooling, vector_length
from adapterhub.errors import ConfigError, unknown

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray


@torch.inference_mode()
def embed(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    adapters: Sequence[RouteRow] | None = None,
    pooling: str | None = None,
    normalize: bool = True,
    prefix: str = "",
    max_length: int | None = None,
    batch_size: int = 64,
) -> NDArray[float32]:
    """Return one vector per text, (texts, d).

    Args:
        model: a model that `load_backbone` loaded without a head; its active adapters apply.
        tokenizer: its tokenizer.
        texts: the texts.
        adapters: the adapter of each text, as in `route`; None: the active ones for all.
        pooling: cls, mean, last or max; None: as the backbone was trained, else mean.
        normalize: whether the vectors have length 1.
        prefix: put before each text, such as "query: ".
        max_length: where texts are cut, in tokens; None: as the backbone was trained.
        batch_size: texts per forward pass.

    Raises:
        ConfigError: an unknown pooling, or not as many adapters as texts.
        AttachError: an adapter is not attached.
    """
    folder = Path(getattr(model, ORIGIN, ""))
    how = pooling or trained_pooling(folder) or "mean"
    if how not in POOLS:
        raise unknown("pooling", how, POOLS)
    if adapters is not None and len(adapters) != len(texts):
        raise ConfigError(
            f"{len(adapters)} adapters for {len(texts)} texts", expected="one for each text"
        )
    limit = min(vector_length(model, tokenizer), max_length or 1 << 30)
    model.eval()
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    vectors = torch.zeros(len(texts), model.config.hidden_size)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        batch = tokenizer(
            [prefix + texts[index] for index in rows],
            truncation=True, max_length=limit, padding=True, return_tensors="pt",
        ).to(model.device)  # fmt: skip
        way = nullcontext() if adapters is None else route(model, [adapters[i] for i in rows])
        with way:
            states = model(**batch).last_hidden_state
        pooled = POOLS[how](states.float(), batch["attention_mask"].bool())
        vectors[rows] = (F.normalize(pooled, dim=-1) if normalize else pooled).cpu()
    found: NDArray[float32] = vectors.numpy()
    return found

"""Embeddings of texts by a model with any adapters: the Python side of the task `embedding`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapters.route import RouteRow, route
from adapterhub.backbones.pooling import vector_length
from adapterhub.backbones.sentence_modules import modules_of_model
from adapterhub.backbones.task_models import text_config
from adapterhub.backbones.torch_free_checks import check_vector_pooling
from adapterhub.errors import ConfigError
from adapterhub.tasks.embedding import refuse_decoder

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
    normalize: bool | None = None,
    prefix: str | None = None,
    modules: str | None = None,
    max_length: int | None = None,
    batch_size: int = 64,
) -> NDArray[float32]:
    """Return one vector per text, (texts, d), as `SentenceTransformer.encode` does.

    Args:
        model: a model that `load_backbone` loaded without a head; its active adapters apply.
        tokenizer: its tokenizer.
        texts: the texts.
        adapters: the adapter of each text, as in `route`; None: the active ones for all.
        pooling: cls, mean, last, max, mean_sqrt_len_tokens or weightedmean, or several joined by +;
            None: as the backbone was trained, else mean.
        normalize: whether the vectors have length 1; None: as the backbone was trained, else true.
        prefix: text to put before each text, such as "query: "; None: the default prompt of the
            backbone.
        modules: "none" to use the transformer and the pooling alone, without the other modules of a
            sentence encoder.
        max_length: the longest text in tokens, longer ones are cut; None: as the backbone was
            trained.
        batch_size: texts per forward pass.

    Raises:
        BackboneError: the backbone has modules that are not supported.
        ConfigError: the pooling is unknown, the model is an encoder-decoder, or the numbers of
            adapters and texts differ.
        AttachError: an adapter is not attached.
    """
    own = modules_of_model(model, modules)
    chosen = check_vector_pooling(pooling or own.pooling)
    refuse_decoder(model)
    own.check_sizes(chosen, text_config(model).hidden_size)
    unit = own.normalize if normalize is None else normalize
    prompt = own.prompt if prefix is None else prefix
    if adapters is not None and len(adapters) != len(texts):
        raise ConfigError(
            f"{len(adapters)} adapters for {len(texts)} texts", expected="one for each text"
        )
    limit = min(vector_length(model, tokenizer), max_length or 1 << 30)
    skipped = own.skipped(prompt, tokenizer, limit)
    model.eval()
    written = [own.text(prompt + text) for text in texts]
    vectors = torch.zeros(len(texts), 0)
    for rows, batch, states in _passes(model, tokenizer, written, adapters, limit, batch_size):
        skip = torch.full((len(rows),), skipped) if skipped else None
        mask = batch["attention_mask"]
        computed = own.vectors(states, mask, pooling=chosen, normalize=unit, skip=skip)
        vectors = vectors if vectors.shape[1] else vectors.new_zeros(len(texts), computed.shape[1])
        vectors[rows] = computed.cpu()
    numbers: NDArray[float32] = vectors.numpy()
    return numbers


def _passes(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    adapters: Sequence[RouteRow] | None,
    limit: int,
    batch_size: int,
) -> Iterator[tuple[list[int], Any, torch.Tensor]]:
    """Yield the rows of each batch, its inputs, and its token states; short texts first."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        some = [texts[index] for index in rows]
        batch = tokenizer(
            some, truncation=True, max_length=limit, padding=True, return_tensors="pt"
        ).to(model.device)
        with nullcontext() if adapters is None else route(model, [adapters[i] for i in rows]):
            states = model(**batch).last_hidden_state
        yield rows, batch, states

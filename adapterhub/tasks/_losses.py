"""Losses of logits: those that models compute of their labels, for some rows of a batch alone.

A model of transformers returns one loss for its batch. Where rows of several runs share a batch,
each run has a loss of its own: the same function of its rows of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from adapterhub.tasks._rows import IGNORED

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Loss = Callable[[Any, Mapping[str, "Tensor"]], "Tensor | None"]
"""Computes the loss of a batch from the model's output and the batch."""

Items = Callable[[Mapping[str, "Tensor"]], float]
"""Counts the items of a batch over which its loss is a mean."""


OF_LOSS = "loss."
"""Begins the names of what the loss of a batch reads, and the model does not get."""


def model_inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a batch that the model gets."""
    return {name: tensor for name, tensor in batch.items() if not name.startswith(OF_LOSS)}


def batch_rows(batch: Mapping[str, Tensor]) -> float:
    """Count the rows of a batch."""
    return len(next(iter(batch.values())))


def batch_labels(batch: Mapping[str, Tensor], *, shifted: bool = False) -> float:
    """Count the labels of a batch; without labels of classes or tokens, its rows.

    Args:
        batch: the batch.
        shifted: whether each label is predicted at the token before it: the first one is not.
    """
    labels = batch.get("labels")
    if labels is None or labels.is_floating_point():
        return batch_rows(batch)
    return int(((labels[:, 1:] if shifted else labels) != IGNORED).sum())


def class_loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the labels: of texts, tokens or choices."""
    import torch.nn.functional as F

    logits = output.logits.flatten(0, -2).float()
    return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORED)


def next_token_loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the labels, each predicted at the token before it."""
    import torch.nn.functional as F

    # As in transformers, the labels move: a slice of the logits would be a copy of them.
    labels = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    logits = output.logits.float().flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)


def squared_error(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean squared error of one number for each row."""
    import torch.nn.functional as F

    return F.mse_loss(output.logits.squeeze(), batch["labels"].squeeze())


def relevance_loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean binary cross-entropy of one output for each row."""
    import torch.nn.functional as F

    logits = output.logits.squeeze(-1).float()
    return F.binary_cross_entropy_with_logits(logits, batch["labels"].float())


def label_set_loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean binary cross-entropy, in which each label is a decision of its own."""
    import torch.nn.functional as F

    return F.binary_cross_entropy_with_logits(output.logits, batch["labels"])


def span_loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean of the cross-entropies of the first and the last token of the answer."""
    import torch.nn.functional as F

    tokens = output.start_logits.shape[1]
    starts, ends = (batch[f"{end}_positions"].clamp(0, tokens) for end in ("start", "end"))
    loss_of_starts = F.cross_entropy(output.start_logits, starts, ignore_index=tokens)
    return (loss_of_starts + F.cross_entropy(output.end_logits, ends, ignore_index=tokens)) / 2


def span_loss_of_text(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return `span_loss`, in which no answer begins or ends in the padding.

    Models count the padding as further candidates: the loss of a text would depend on how long the
    others of its batch are.
    """
    padding = batch["attention_mask"] == 0
    logits = {
        name: getattr(output, name).masked_fill(padding, float("-inf"))
        for name in ("start_logits", "end_logits")
    }
    return span_loss(SimpleNamespace(**logits), batch)


LOSSES: Mapping[str, Loss] = {
    "classification": class_loss,
    "regression": squared_error,
    "multi-label": label_set_loss,
    "tagging": class_loss,
    "question-answering": span_loss,
    "multiple-choice": class_loss,
    "image-classification": class_loss,
    "audio-classification": class_loss,
    "causal-lm": next_token_loss,
    "image-text-to-text": next_token_loss,
    "masked-lm": class_loss,
    "seq2seq": class_loss,
}
"""The loss of a model by its kind, the `head` of a task."""


def corrected_loss(model: PreTrainedModel, kind: str) -> Loss | None:
    """Return the loss to use in place of the model's own; None: its own is right.

    Args:
        model: the model.
        kind: its kind, the `head` of a task.
    """
    from adapterhub.backbones.causality import shifts_labels  # imports torch

    if kind != "causal-lm" or shifts_labels(model):
        return None
    return next_token_loss


def without_labels(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs for which a model computes the same logits, and no loss.

    Encoder-decoders read the tokens of their decoder from the labels; they keep them if only their
    forward can do that.
    """
    from transformers.utils.generic import find_labels

    names = find_labels(type(model))
    batch = model_inputs(batch)
    inputs = {name: tensor for name, tensor in batch.items() if name not in names}
    if not (model.config.is_encoder_decoder and model.can_generate()) or "labels" not in batch:
        return inputs
    if shifted := getattr(model, "prepare_decoder_input_ids_from_labels", None):
        return {"decoder_input_ids": shifted(labels=batch["labels"]), **inputs}
    return dict(batch)

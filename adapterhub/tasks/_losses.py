"""Losses of a batch in place of the model's own, and the items over which a loss is a mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def next_token_loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the labels, each predicted at the token before it."""
    import torch.nn.functional as F

    # As in transformers, the labels move: a slice of the logits would be a copy of them.
    labels = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    logits = output.logits.float().flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)


def relevance_loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean binary cross-entropy of one output for each row."""
    import torch.nn.functional as F

    logits = output.logits.squeeze(-1).float()
    return F.binary_cross_entropy_with_logits(logits, batch["labels"].float())


def span_loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean of the cross-entropies of the first and the last token of the answer.

    No answer begins or ends in the padding. Models count the padding as further candidates: the
    loss of a text would depend on how long the others of its batch are.
    """
    import torch.nn.functional as F

    padding, tokens = batch["attention_mask"] == 0, output.start_logits.shape[1]
    losses = [
        F.cross_entropy(
            logits.masked_fill(padding, float("-inf")),
            batch[f"{end}_positions"].clamp(0, tokens),
            ignore_index=tokens,
        )
        for end, logits in (("start", output.start_logits), ("end", output.end_logits))
    ]
    return (losses[0] + losses[1]) / 2


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

"""The loss of a frozen language-model head, one chunk of tokens at a time.

    loss       = 1/n sum_t (logsumexp(z_t) - z_t[y_t])           z_t = W h_t + b
    dloss/dh_t = 1/n W^T (softmax(z_t) - onehot(y_t))

    h_t: (d,), the state of a token that is learned, below the head    n: their number
    W: (vocabulary, d), b: (vocabulary,), frozen                       y_t: the token to predict

A model computes the logits z of all tokens and keeps them for the backward pass: 12.5 bytes for
each token and vocabulary entry with the fp32 loss of transformers. Here only the logits of one
chunk exist at a time, and only the gradient of h is kept, since W is frozen. Logits are not
computed for tokens that are not learned (prompts, padding). The matrix products are the same as in
the usual forward and backward pass.

If a model scales or bounds its logits, or adds another loss, its own loss is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.adapters.adapter import Adapter
from adapterhub.backbones.probe import evaluation_mode
from adapterhub.loop.engine import Batch, Engine
from adapterhub.loop.processes import process_count
from adapterhub.loop.speedups import Speedup, Trial, Undo
from adapterhub.recipe.recipe import RunOptions
from adapterhub.speed.activation_memory import LOGIT_BYTES
from adapterhub.tasks import Task
from adapterhub.tasks.common.batches import IGNORED
from adapterhub.tasks.common.language_models import (
    few_tokens,
    logits_at_once,
    plain_head,
    states_below,
    targets_of,
    token_chunks,
    whole_output,
)

WRITES_TEXT = {"causal-lm", "image-text-to-text", "seq2seq", "masked-lm"}


class HeadLoss(Speedup):
    """The loss of the batches of one run.

    It is tried on a row of few tokens, for which the model keeps all logits. With `shifted`, each
    token is predicted from those before it. `saving` describes the memory saved.
    """

    def __init__(
        self, adapter: Adapter, head: nn.Linear, shifted: bool, few: Batch, saving: str
    ) -> None:
        self.adapter, self.head, self.shifted = adapter, head, shifted
        self.trial, self.saving = Trial([few]), saving

    def patch(self, engine: Engine) -> Undo | None:
        """Compute the losses of a run in chunks, unless the head is being trained."""
        if not _is_frozen(self.head):
            return None
        engine.below_head = self
        return partial(setattr, engine, "below_head", None)

    def said(self) -> str:
        """Report the memory saved, once."""
        line, self.saving = self.saving, ""
        return line

    def __call__(self, batch: Batch) -> Tensor | None:
        """Return the loss of a batch; None if the head is not called."""
        states = states_below(self.adapter.backbone.pretrained, self.head, batch)
        if states is None:
            return None
        targets = targets_of(batch, self.shifted)
        learned = targets != IGNORED
        return head_loss(states[learned], self.head, targets[learned])


def _is_frozen(head: nn.Linear) -> bool:
    return not any(parameter.requires_grad for parameter in head.parameters())


def head_loss(states: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of tokens: h is (n, d), y is (n,)."""
    kind = states.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        weight, bias = head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype)
        states = states.to(dtype)
    else:
        weight, bias = head.weight, head.bias
    apply: Any = _ChunkedLoss.apply
    loss: Tensor = apply(states, weight, bias, targets, token_chunks(len(states), head))
    return loss


class _ChunkedLoss(torch.autograd.Function):
    """The loss and its gradient for the states, both computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        parts: list[slice],
    ) -> Tensor:
        """Compute both. states: (n, d), weight: (vocabulary, d), targets: (n,) -> ()."""
        total = states.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(states)
        with torch.autocast(states.device.type, enabled=False):
            for part in parts:
                scores = F.linear(states[part], weight, bias).float()
                labels = targets[part, None]
                rest = scores.logsumexp(-1, keepdim=True)
                total += (rest - scores.gather(-1, labels)).sum()
                shares = scores.sub_(rest).exp_()
                shares.scatter_add_(-1, labels, -torch.ones_like(rest))
                gradient[part] = shares.to(weight.dtype) @ weight
        ctx.save_for_backward(gradient)
        return total / len(states)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Scale the gradient after the product, so that it does not vanish in fp16."""
        (gradient,) = ctx.saved_tensors
        return gradient * (outer / max(len(gradient), 1)), None, None, None, None


def frozen_head(adapter: Adapter, task: Task, options: RunOptions) -> nn.Linear | None:
    """Return the head of a language model if its loss can be computed in chunks; else None."""
    known = task.head in WRITES_TEXT
    head = plain_head(adapter.backbone.pretrained) if known else None
    if head is None or not _is_frozen(head) or process_count() > 1 or options.shard:
        return None
    return head


def choose_head_loss(
    adapter: Adapter, task: Task, options: RunOptions, row: Callable[[], Batch]
) -> HeadLoss | None:
    """Return the chunked loss, if it saves much memory and the head returns the logits."""
    head, tokens = frozen_head(adapter, task, options), options.batch_size * options.max_length
    if head is None or (at_once := logits_at_once(head, tokens)) == tokens:
        return None
    few = few_tokens(row())
    moved = {name: tensor.to(head.weight.device) for name, tensor in few.items()}
    with evaluation_mode(adapter.model), torch.no_grad():
        if whole_output(adapter.backbone.pretrained, head, moved) is None:
            return None
    saved = LOGIT_BYTES * (tokens - at_once) * head.weight.shape[0] / 1e9
    saving = (
        f"logits of {at_once:,} tokens at a time, not of {tokens:,}: {saved:.1f} GB less memory"
    )
    return HeadLoss(adapter, head, task.predicts_next, few, saving)

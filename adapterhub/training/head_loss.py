"""The loss of a frozen language-model head, a chunk of tokens at a time.

    loss       = 1/n sum_t (logsumexp(z_t) - z_t[y_t])           z_t = W h_t + b
    dloss/dh_t = 1/n W^T (softmax(z_t) - onehot(y_t))

    h_t: (d,), the state of a token that is learned, below the head    n: their number
    W: (vocabulary, d), b: (vocabulary,), frozen                       y_t: the token to predict

A model computes the logits z of all tokens, and keeps them for the backward pass: 12.5 bytes for
each token and entry of the vocabulary with the fp32 loss of transformers. Here the logits of one
chunk are there at a time, and only the gradient of h is kept, since W has none. Tokens that are not
learned (prompts, padding) have no logits at all. The products are those of the usual forward and
backward pass.

Before the first step, loss and gradients of a few tokens are computed both ways. Where they differ
(a model that scales or bounds its logits, or that adds another loss), the model's own is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.adapters.adapter import Adapter
from adapterhub.tasks import Task
from adapterhub.tasks._below_head import (
    few_tokens,
    logits_at_once,
    plain_head,
    states_below,
    targets_of,
    token_chunks,
    whole_output,
)
from adapterhub.tasks._rows import IGNORED
from adapterhub.training.activation_memory import LOGIT_BYTES
from adapterhub.training.batching import Batch
from adapterhub.training.engine import model_loss
from adapterhub.training.options import RunOptions
from adapterhub.training.processes import process_count
from adapterhub.training.task_mixture import TaskMixture

_WRITES_TEXT = {"causal-lm", "image-text-to-text", "seq2seq", "masked-lm"}


class HeadLoss:
    """The loss of the batches of one run.

    Args:
        adapter: the adapter that trains.
        head: the head of its model.
        shifted: whether each token is predicted from those before it.
    """

    def __init__(self, adapter: Adapter, head: nn.Linear, shifted: bool) -> None:
        self.adapter, self.head, self.shifted = adapter, head, shifted

    def __call__(self, batch: Batch) -> Tensor | None:
        """Return the loss of a batch; None where the head trains now, or is not called."""
        if not _is_frozen(self.head):
            return None
        states = states_below(self.adapter.model, self.head, batch)
        if states is None:
            return None
        targets = targets_of(batch, self.shifted)
        learned = targets != IGNORED
        return head_loss(states[learned], self.head, targets[learned])


def _is_frozen(head: nn.Linear) -> bool:
    return not any(parameter.requires_grad for parameter in head.parameters())


def head_loss(states: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of tokens.

    Args:
        states: h, (n, d).
        head: W, (vocabulary, d), and b.
        targets: y, (n,).
    """
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
    """The loss, and its gradient with respect to the states, computed in the forward pass."""

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
                wanted = targets[part, None]
                rest = scores.logsumexp(-1, keepdim=True)
                total += (rest - scores.gather(-1, wanted)).sum()
                shares = scores.sub_(rest).exp_()
                shares.scatter_add_(-1, wanted, -torch.ones_like(rest))
                gradient[part] = shares.to(weight.dtype) @ weight
        ctx.save_for_backward(gradient)
        return total / len(states)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Scale the gradient: after the product, so that it does not vanish in fp16."""
        (gradient,) = ctx.saved_tensors
        return gradient * (outer / max(len(gradient), 1)), None, None, None, None


def frozen_head(adapter: Adapter, task: Task, options: RunOptions) -> nn.Linear | None:
    """Return the head of a language model, if its loss may be computed in chunks; else None.

    Args:
        adapter: the adapter that trains.
        task: its task.
        options: the training options.
    """
    known = task.head in _WRITES_TEXT and not isinstance(task, TaskMixture)
    head = plain_head(adapter.model) if known else None
    if head is None or not _is_frozen(head) or process_count() > 1 or options.shard:
        return None
    return head


def choose_head_loss(
    adapter: Adapter,
    task: Task,
    options: RunOptions,
    row: Callable[[], Batch],
    note: Callable[[str], None],
) -> HeadLoss | None:
    """Return the loss in chunks, where it is that of the model and spares much memory.

    Args:
        adapter: the adapter that trains.
        task: its task, which has no loss of its own.
        options: the training options.
        row: returns a batch of one row of the training data.
        note: gets a line for the user.
    """
    head, tokens = frozen_head(adapter, task, options), options.batch_size * options.max_length
    at_once = logits_at_once(head, tokens)
    if head is None or at_once == tokens:
        return None
    chosen = HeadLoss(adapter, head, shifted=task.predicts_next)
    if not _agrees(chosen, few_tokens(row())):
        return None
    saved = LOGIT_BYTES * (tokens - at_once) * head.weight.shape[0] / 1e9
    note(f"logits of {at_once:,} tokens at a time, not of {tokens:,}: {saved:.1f} GB less memory")
    return chosen


def _agrees(chosen: HeadLoss, batch: Batch) -> bool:
    """Return whether loss and gradients of a batch are those that the model computes."""
    adapter = chosen.adapter
    device = next(iter(adapter.parameters())).device
    moved = {name: tensor.to(device) for name, tensor in batch.items()}
    trained = [p for p in adapter.parameters() if p.requires_grad]
    found = []
    for compute in (partial(_whole_loss, chosen), chosen):
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            torch.manual_seed(0)
            loss = compute(moved)
        if loss is None or not loss.isfinite():
            return False
        found.append([loss.detach(), *torch.autograd.grad(loss, trained, allow_unused=True)])
    half = adapter.model.dtype != torch.float32 or torch.is_autocast_enabled(device.type)
    tolerance = 0.05 if half else 1e-3
    return all(_close(one, other, tolerance) for one, other in zip(*found, strict=True))


def _whole_loss(chosen: HeadLoss, batch: Batch) -> Tensor | None:
    output = whole_output(chosen.adapter.model, chosen.head, batch)
    return None if output is None else model_loss(output, batch)


def _close(one: Tensor | None, other: Tensor | None, tolerance: float) -> bool:
    if one is None or other is None:
        return one is other
    return bool((one - other).float().norm() <= tolerance * one.float().norm() + 1e-6)

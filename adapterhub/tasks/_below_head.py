"""What a language model computes below its head, and losses of tokens without all of its logits.

The logits of all tokens are the largest tensor of a pass: one number for each token and entry of
the vocabulary. The loss needs those of one token at a time, and of learned tokens alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from adapterhub.tasks._losses import model_inputs
from adapterhub.tasks._rows import IGNORED

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

_WORTHWHILE = 1 << 24  # logits of a batch: 64 MiB in fp32
_CHUNK = {"cpu": 1 << 23}  # logits of a chunk, 32 MiB in fp32: larger ones leave the caches
_CHUNK_ELSEWHERE = 1 << 27
_FEW = 64  # tokens
_OF_TOKENS = {"input_ids", "attention_mask", "token_type_ids", "position_ids", "labels"}


class _Reached(Exception):
    """A pass ends below the head."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states


def plain_head(model: PreTrainedModel) -> nn.Linear | None:
    """Return the head of a language model, if it is a linear layer and nothing else; else None.

    It has no hooks and is not quantized: no adapter, and no offloading, is in between.
    """
    from torch import nn

    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.weight.is_meta:
        return None
    hooked = head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head)
    return None if hooked or head._modules else head


def states_below(model: PreTrainedModel, head: nn.Linear, batch: Mapping[str, Tensor]) -> Any:
    """Return what the head would read of a batch, (batch, tokens, d); the pass ends there.

    None: the head is not called.
    """
    handle = head.register_forward_pre_hook(_end)
    try:
        model(**model_inputs(batch))
    except _Reached as reached:
        return reached.states
    finally:
        handle.remove()
    return None


def _end(head: nn.Module, args: tuple[Any, ...]) -> None:
    raise _Reached(args[0])


def whole_output(model: PreTrainedModel, head: nn.Linear, batch: Mapping[str, Tensor]) -> Any:
    """Compute the output of a model; None if its logits are not what the head returned.

    Logits that are scaled or bounded differ, even where their loss is the same by rounding. None
    too if the model does not take these tokens, as Reformer only takes certain numbers of them.
    """
    import torch

    written: list[Tensor] = []
    handle = head.register_forward_hook(lambda _, args, output: written.append(output))
    try:
        output = model(**model_inputs(batch))
    except (RuntimeError, ValueError):
        return None
    finally:
        handle.remove()
    same = len(written) == 1 and torch.equal(written[0].float(), output.logits.float())
    return output if same else None


def few_tokens(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a row with few of its tokens, the last learned one among them, to compare logits of.

    Rows with more than ids, as of pictures, whose tokens belong together, are returned whole.
    """
    labels = batch["labels"]
    if not batch.keys() <= _OF_TOKENS or any(tensor.dim() != 2 for tensor in batch.values()):
        return dict(batch)
    learned = (labels[0] != IGNORED).nonzero()
    end = int(learned[-1]) + 1 if len(learned) else labels.shape[1]
    window = slice(max(end - _FEW, 0), end)
    return {n: t[:, window] if t.shape == labels.shape else t for n, t in batch.items()}


def targets_of(batch: Mapping[str, Tensor], shifted: bool) -> Tensor:
    """Return the token to predict at each place, (batch, tokens); IGNORED where none is learned.

    `shifted`: each token is predicted from those before it.
    """
    import torch.nn.functional as F

    labels = batch["labels"]
    return F.pad(labels, (0, 1), value=IGNORED)[:, 1:] if shifted else labels


def logits_at_once(head: nn.Linear | None, tokens: int) -> int:
    """Return how many of some tokens have their logits at a time: all, if they are few.

    `head` is None where all tokens have their logits.
    """
    if head is None or tokens * head.weight.shape[0] < _WORTHWHILE:
        return tokens
    return min(tokens, _chunk(head))


def _chunk(head: nn.Linear) -> int:
    most = _CHUNK.get(head.weight.device.type, _CHUNK_ELSEWHERE)
    return max(most // head.weight.shape[0], 1)


def token_chunks(tokens: int, head: nn.Linear) -> list[slice]:
    """Divide tokens into those that have their logits at a time."""
    size = _chunk(head)
    return [slice(begin, begin + size) for begin in range(0, tokens, size)]


def token_losses(states: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each token, (n,), in fp32, without gradients.

    states: (n, d), targets: (n,).
    """
    import torch
    import torch.nn.functional as F

    losses = torch.zeros(len(targets), device=targets.device)
    with torch.no_grad():
        for part in token_chunks(len(targets), head):
            scores = head(states[part]).float()
            losses[part] = F.cross_entropy(scores, targets[part], reduction="none")
    return losses

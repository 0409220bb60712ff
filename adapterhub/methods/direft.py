"""DiReFT: a low-rank update of the states of a few tokens.

    h' = h + Pᵀ (W h + b)                                                         (equation 3)

    h, h': (d,)    W, P: (rank, d)    b: (rank,)

LoReFT without orthonormal rows and without the difference: a LoRA at states in place of weights.
At first W = 0 and b = 0, so the initial edit is none; with `init: paper`, both are those of a
linear layer.

The edit is of the output of a layer, at the first and the last tokens of the prompt: `f1+l1` are
one of each. The prompt is what comes before the first token that is learned, and in `generate` its
input; a model that writes no text has whole texts. With `shared`, one edit is for both. An edit is
applied once, when the prompt is read: further tokens cost what they cost without it.

Parameters: rank (2 d + 1) per edit.

Wu et al. 2024, "ReFT: Representation Finetuning for Language Models", section 3.2,
https://arxiv.org/abs/2404.03592.
"""

from __future__ import annotations

from dataclasses import dataclass

from adapterhub.methods._base import register_method
from adapterhub.methods._reft import StateMethod


@register_method
@dataclass(frozen=True)
class DiReFT(StateMethod):
    """Low-rank updates of the states of a few tokens."""

    name = "direft"
    paper = "Wu et al. 2024, https://arxiv.org/abs/2404.03592"
    summary = "low-rank updates of the states of a few tokens"
    orthonormal = False
    subtracts = False

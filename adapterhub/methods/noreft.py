"""NoReFT: LoReFT without orthonormal rows, an ablation of it.

    h' = h + Pᵀ (W h + b - P h)                                                   (appendix E)

    h, h': (d,)    W, P: (rank, d)    b: (rank,)

At first W = P and b = 0, so the initial edit is none; with `init: paper`, W and b are those of a
linear layer.

The edit is of the output of a layer, at the first and the last tokens of the prompt: `f1+l1` are
one of each. The prompt is what comes before the first token that is learned, and in `generate` its
input; a model that writes no text has whole texts. With `shared`, one edit is for both. An edit is
applied once, when the prompt is read: further tokens cost what they cost without it.

Parameters: rank (2 d + 1) per edit.

Wu et al. 2024, "ReFT: Representation Finetuning for Language Models", appendix E,
https://arxiv.org/abs/2404.03592.
"""

from __future__ import annotations

from dataclasses import dataclass

from adapterhub.methods._base import register_method
from adapterhub.methods._reft import StateMethod


@register_method
@dataclass(frozen=True)
class NoReFT(StateMethod):
    """Edits of the states of a few tokens in any subspace."""

    name = "noreft"
    paper = "Wu et al. 2024, https://arxiv.org/abs/2404.03592"
    summary = "LoReFT without an orthonormal basis"
    orthonormal = False
    subtracts = True

"""LoReFT: states of a few tokens are edited in a subspace with an orthonormal basis.

    h' = h + Rᵀ (W h + b - R h)                                                   (equation 2)

    h, h': (d,)    R: (rank, d), orthonormal rows    W: (rank, d)    b: (rank,)

In the subspace of R the state becomes W h + b; outside of it, h stays. R is L⁻¹ P with a trained
P: (rank, d) and L Lᵀ = P Pᵀ. At first W = R and b = 0, so the initial edit is none; with `init:
paper`, W and b are those of a linear layer.

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
class LoReFT(StateMethod):
    """Edits of the states of a few tokens in an orthonormal subspace."""

    name = "loreft"
    paper = "Wu et al. 2024, https://arxiv.org/abs/2404.03592"
    summary = "edits of the states of a few tokens in an orthonormal subspace"
    orthonormal = True
    subtracts = True

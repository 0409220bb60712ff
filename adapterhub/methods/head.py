"""Linear probe: train only the task head, on a frozen backbone.

    logits = W h + b,   W and b trained

    h: (batch, d), the input of the head for each text    W: (labels, d)    b: (labels,)

The head is defined by the model's class: some classes have another layer before W. It trains with
every method; here it is the only part that trains.

Parameters: only the head's, none of the backbone.

Devlin et al. 2019, "BERT", section 5.3 (feature-based approach), https://arxiv.org/abs/1810.04805;
the term is from Alain & Bengio 2017, https://arxiv.org/abs/1610.01644.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from adapterhub.anatomy.sites import Anatomy
from adapterhub.methods.common.base import Method, PlanStep, register_method


@register_method
@dataclass(frozen=True)
class Head(Method):
    """Train only the task head."""

    name = "head"
    paper = "Alain & Bengio 2017, https://arxiv.org/abs/1610.01644"
    summary = "train only the task head (linear probe)"
    learning_rate = 5e-3

    def plan(self, anatomy: Anatomy) -> Iterator[PlanStep]:
        """Yield nothing: the head trains with every method."""
        return iter(())

    def count(self, anatomy: Anatomy) -> int:
        """Return 0: the head is not counted."""
        return 0

"""Linear probe: the backbone is frozen and only the task head trains. Parameters: none but the
head's.

Devlin et al. 2019, "BERT", section 5.3 (feature-based approach), https://arxiv.org/abs/1810.04805;
the name is of Alain & Bengio 2017, https://arxiv.org/abs/1610.01644.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from adapterhub.anatomy.sites import Anatomy
from adapterhub.methods._base import Method, PlanStep, register_method


@register_method
@dataclass(frozen=True)
class Head(Method):
    """Only the task head trains."""

    name = "head"
    paper = "Alain & Bengio 2017, https://arxiv.org/abs/1610.01644"
    summary = "only the task head trains (linear probe)"
    learning_rate = 5e-3

    def plan(self, anatomy: Anatomy) -> Iterator[PlanStep]:
        """Nothing: a head trains with every method."""
        return iter(())

    def count(self, anatomy: Anatomy) -> int:
        """None but the head's."""
        return 0

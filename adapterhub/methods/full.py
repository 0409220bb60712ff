"""Full fine-tuning: every parameter of the backbone trains. Parameters: all of them.

The baseline of every paper here, for instance Devlin et al. 2019, "BERT", section 4,
https://arxiv.org/abs/1810.04805 (whose learning rates are 2e-5 to 5e-5).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from adapterhub.backbones.anatomy import Anatomy
from adapterhub.methods.base import Method, Unfrozen, register


@register
@dataclass(frozen=True)
class Full(Method):
    """Every parameter of the backbone trains."""

    name = "full"
    paper = "Devlin et al. 2019, https://arxiv.org/abs/1810.04805"
    summary = "every parameter of the backbone trains"
    learning_rate = 5e-5
    trains_backbone = True

    def plan(self, anatomy: Anatomy) -> Iterator[Unfrozen]:
        """All backbone parameters."""
        return (Unfrozen(path) for path in anatomy.parameters())

    def count(self, anatomy: Anatomy) -> int:
        """The size of the backbone."""
        return sum(p.numel() for p in anatomy.parameters().values())

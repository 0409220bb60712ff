"""Full fine-tuning: every parameter of the backbone trains. Parameters: all of them.

The baseline of every paper here, for instance Devlin et al. 2019, "BERT", section 4,
https://arxiv.org/abs/1810.04805 (whose learning rates are 2e-5 to 5e-5). With `decay` the learning
rate falls from layer to layer: Howard & Ruder 2018, section 3.2, https://arxiv.org/abs/1801.06146.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.layer_depth import layers_above
from adapterhub.config.options import option
from adapterhub.methods._base import Unfreezing, Unfrozen, register_method
from adapterhub.methods._options import require_decay


@register_method
@dataclass(frozen=True)
class Full(Unfreezing):
    """Every parameter of the backbone trains."""

    name = "full"
    paper = "Devlin et al. 2019, https://arxiv.org/abs/1810.04805"
    summary = "every parameter of the backbone trains"
    learning_rate = 5e-5

    decay: float = option(1.0, "the learning rate of a layer: that of the layer above over this")

    def __post_init__(self) -> None:
        require_decay(self)

    def plan(self, anatomy: Anatomy) -> Iterator[Unfrozen]:
        """All backbone parameters."""
        for path, above in layers_above(anatomy).items():
            yield Unfrozen(path, rate=self.decay**-above)

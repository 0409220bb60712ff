"""Full fine-tuning: train every parameter of the backbone. Parameters: all of them.

The baseline of the other methods' papers. Devlin et al. 2019, "BERT", section 4,
https://arxiv.org/abs/1810.04805, use learning rates of 2e-5 to 5e-5. With `decay` the learning rate
decreases from layer to layer: Howard & Ruder 2018, section 3.2, https://arxiv.org/abs/1801.06146.
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
    """Train every parameter of the backbone."""

    name = "full"
    paper = "Devlin et al. 2019, https://arxiv.org/abs/1810.04805"
    summary = "train every parameter of the backbone"
    learning_rate = 5e-5

    decay: float = option(1.0, "learning rate divisor per layer, from the top down")

    def __post_init__(self) -> None:
        require_decay(self)

    def plan(self, anatomy: Anatomy) -> Iterator[Unfrozen]:
        """Yield all backbone parameters."""
        for path, above in layers_above(anatomy).items():
            yield Unfrozen(path, rate=self.decay**-above)

"""Full fine-tuning: train every parameter of the backbone.

    layer l of L trains at the learning rate eta / decay^(L - l)

This is the baseline of the other methods' papers; with BERT, learning rates eta of 2e-5 to 5e-5 are
used. The modules above the layers train at eta, the embeddings at eta / decay^L. With `decay: 1`,
the default, all learning rates are equal.

Parameters: all of them.

Devlin et al. 2019, "BERT", section 4, https://arxiv.org/abs/1810.04805; learning rates that
decrease from layer to layer: Howard & Ruder 2018, section 3.2, https://arxiv.org/abs/1801.06146.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from adapterhub.anatomy.sites import Anatomy
from adapterhub.config.options import option
from adapterhub.methods.common.base import Unfreezing, Unfrozen, register_method


@register_method
@dataclass(frozen=True)
class Full(Unfreezing):
    """Train every parameter of the backbone."""

    name = "full"
    training_options = ("decay",)
    paper = "Devlin et al. 2019, https://arxiv.org/abs/1810.04805"
    summary = "train every parameter of the backbone"
    learning_rate = 5e-5

    decay: float = option(
        1.0, "learning rate divisor per layer, from the top down", least=0.01, most=100
    )

    def plan(self, anatomy: Anatomy) -> Iterator[Unfrozen]:
        """Yield all backbone parameters."""
        for path, above in anatomy.layers_above().items():
            yield Unfrozen(path, rate=self.decay**-above)

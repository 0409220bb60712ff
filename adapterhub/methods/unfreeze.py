"""Gradual unfreezing: train the top layers first, then unfreeze lower ones group by group.

    stage k trains the groups 0..k      group k: `size` layers; group 0 is at the top

with learning rates that decrease from the top down (discriminative fine-tuning), and increase and
decrease over the run (slanted triangular):

    eta^(l-1) = eta^l / decay                                      (section 3.2, equations 1 and 2)
    eta_t = eta_max (1 + p (ratio - 1)) / ratio                    (section 3.2, equation 3)

Group 0 includes the modules above the layers (a final norm, a pooler); the last group consists of
the embeddings. In an encoder-decoder the decoder's layers are above the encoder's. The task head
trains from the start, at its own learning rate.

Parameters: all of the backbone.

Howard & Ruder 2018, "Universal Language Model Fine-tuning for Text Classification", sections 3.2
and 3.3, https://arxiv.org/abs/1801.06146.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from adapterhub.anatomy.sites import Anatomy
from adapterhub.config.options import option
from adapterhub.methods.common.base import Unfrozen, register_method
from adapterhub.methods.staged import StagedUnfreezing


@register_method
@dataclass(frozen=True)
class Unfreeze(StagedUnfreezing):
    """Unfreeze the layers gradually, from the top down."""

    name = "unfreeze"
    training_options = ("every", "patience", "size", "decay")
    paper = "Howard & Ruder 2018, https://arxiv.org/abs/1801.06146"
    summary = "gradual unfreezing, from the top layer down"
    learning_rate = 1e-4
    schedule = "slanted"

    size: int = option(1, "layers per group", least=1)
    decay: float = option(
        2.6, "learning rate divisor per group, from the top down", least=0.01, most=100
    )

    def plan(self, anatomy: Anatomy) -> Iterator[Unfrozen]:
        """Yield all backbone parameters, each from the stage of its group on."""
        for path, stage in self.stages(anatomy).items():
            yield Unfrozen(path, stage, self.decay**-stage)

    def stages(self, anatomy: Anatomy) -> dict[str, int]:
        """Return the group of each parameter, counted from the top."""
        depth = anatomy.layer_count()
        groups = -(-depth // self.size)
        return {
            path: groups if above == depth else above // self.size
            for path, above in anatomy.layers_above().items()
        }

"""Partial fine-tuning: the first layers stay frozen, the rest trains.

The layers of an encoder-decoder count through: the encoder's, then the decoder's. What stands above
the layers (a final norm, a pooler) trains; embeddings, below them, do not. Parameters: those of the
trained layers.

Lee et al. 2019, "What Would Elsa Do? Freezing Layers During Transformer Fine-Tuning",
https://arxiv.org/abs/1911.03090; a quarter of the layers gets near the full result (section 4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.layer_depth import layer_count, layers_above
from adapterhub.config.options import option
from adapterhub.errors import ConfigError
from adapterhub.methods._base import Unfreezing, Unfrozen, register_method
from adapterhub.methods._options import require_decay


@register_method
@dataclass(frozen=True)
class Freeze(Unfreezing):
    """The top layers train, the layers under them stay frozen."""

    name = "freeze"
    paper = "Lee et al. 2019, https://arxiv.org/abs/1911.03090"
    summary = "the top layers train, the first stay frozen"
    learning_rate = 1e-4

    top: int = option(2, "number of layers that train, from the top")
    decay: float = option(1.0, "the learning rate of a layer: that of the layer above over this")

    def __post_init__(self) -> None:
        require_decay(self)

    def plan(self, anatomy: Anatomy) -> Iterator[Unfrozen]:
        """The parameters of the top layers and of what stands above."""
        for path, above in self._trained(anatomy).items():
            yield Unfrozen(path, rate=self.decay**-above)

    def _trained(self, anatomy: Anatomy) -> dict[str, int]:
        depth = layer_count(anatomy)
        if not 0 < self.top <= depth:
            raise ConfigError(
                f"freeze cannot train the top {self.top} of {depth} layers",
                expected=f"top between 1 and {depth}",
            )
        return {path: above for path, above in layers_above(anatomy).items() if above < self.top}

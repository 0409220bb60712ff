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

from adapterhub.backbones.anatomy import Anatomy
from adapterhub.config import option
from adapterhub.errors import ConfigError
from adapterhub.methods.base import Method, Unfrozen, register


@register
@dataclass(frozen=True)
class Freeze(Method):
    """The top layers train, the layers under them stay frozen."""

    name = "freeze"
    paper = "Lee et al. 2019, https://arxiv.org/abs/1911.03090"
    summary = "the top layers train, the first stay frozen"
    learning_rate = 1e-4
    trains_backbone = True

    top: int = option(2, "number of layers that train, from the top")

    def plan(self, anatomy: Anatomy) -> Iterator[Unfrozen]:
        """The parameters of the top layers and of what stands above."""
        return (Unfrozen(path) for path in self._paths(anatomy))

    def count(self, anatomy: Anatomy) -> int:
        """The size of the top layers and of what stands above."""
        parameters = anatomy.parameters()
        return sum(parameters[path].numel() for path in self._paths(anatomy))

    def _paths(self, anatomy: Anatomy) -> list[str]:
        layers = [(name, n) for name in anatomy.stacks for n in range(anatomy.depth(name))]
        if not 0 < self.top <= len(layers):
            raise ConfigError(
                f"freeze cannot train the top {self.top} of {len(layers)} layers",
                expected=f"top between 1 and {len(layers)}",
            )
        trained = {*layers[len(layers) - self.top :], "above"}
        return [path for path in anatomy.parameters() if anatomy.layer_of(path) in trained]

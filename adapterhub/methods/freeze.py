"""Partial fine-tuning: train the top layers, freeze the lower ones.

    layer l of L trains if l > L - top,   at the learning rate eta / decay^(L - l)

In an encoder-decoder the decoder's layers are above the encoder's. Modules above the layers (a
final norm, a pooler) train; embeddings, below them, do not.

Parameters: the parameters of the trained layers and of the modules above them.

Lee et al. 2019, "What Would Elsa Do? Freezing Layers During Transformer Fine-Tuning",
https://arxiv.org/abs/1911.03090; training a quarter of the layers comes close to training all of
them (section 4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from adapterhub.anatomy.sites import Anatomy
from adapterhub.config.options import option
from adapterhub.errors import ConfigError
from adapterhub.methods.common.base import Unfreezing, Unfrozen, register_method


@register_method
@dataclass(frozen=True)
class Freeze(Unfreezing):
    """Train the top layers, freeze the lower ones."""

    name = "freeze"
    training_options = ("decay",)
    paper = "Lee et al. 2019, https://arxiv.org/abs/1911.03090"
    summary = "train the top layers, freeze the lower ones"
    learning_rate = 1e-4

    top: int = option(2, "number of layers to train, from the top")
    decay: float = option(
        1.0, "learning rate divisor per layer, from the top down", least=0.01, most=100
    )

    def plan(self, anatomy: Anatomy) -> Iterator[Unfrozen]:
        """Yield the parameters of the top layers and above them."""
        for path, above in self._trained(anatomy).items():
            yield Unfrozen(path, rate=self.decay**-above)

    def _trained(self, anatomy: Anatomy) -> dict[str, int]:
        depth = anatomy.layer_count()
        if not 0 < self.top <= depth:
            raise ConfigError(
                f"freeze cannot train the top {self.top} of {depth} layers",
                expected=f"top between 1 and {depth}",
            )
        return {path: above for path, above in anatomy.layers_above().items() if above < self.top}

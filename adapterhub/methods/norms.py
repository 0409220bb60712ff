"""Norm tuning: train only the scales and biases of the normalization layers.

    LayerNorm:  y = g * (x - mean) / sd + b         RMSNorm:  y = g * x / rms

    x, y: (batch, tokens, d)    g, b: (d,), trained

These are the norms in the layers and outside them (after the embeddings, the final one).

Parameters: the sizes of g and b.

Qi et al. 2022, "Parameter-Efficient Tuning on Layer Normalization for Pre-trained Language
Models", https://arxiv.org/abs/2211.08682; Zhao et al. 2024, "Tuning LayerNorm in
Attention", https://arxiv.org/abs/2312.11420.
"""

from __future__ import annotations

from dataclasses import dataclass

from adapterhub.anatomy.sites import Anatomy
from adapterhub.config.options import option
from adapterhub.errors import SiteError
from adapterhub.methods.common.base import Layers, Unfreezing, register_method
from adapterhub.methods.common.projections import in_layers


@register_method
@dataclass(frozen=True)
class Norms(Unfreezing):
    """Train only the normalization layers of the backbone."""

    name = "norms"
    paper = "Qi et al. 2022, https://arxiv.org/abs/2211.08682"
    summary = "train only the normalization layers of the backbone"
    learning_rate = 1e-3

    layers: Layers = option("all", "layers to train: all, 'top 4', '0..3', [0, 5]")
    outside: bool = option(True, "also train norms outside the layers, such as the final one")

    def paths(self, anatomy: Anatomy) -> list[str]:
        """Return the parameters of the selected norms.

        Raises:
            SiteError: the model lacks such norms.
        """
        paths = norm_parameters(anatomy)
        selected = in_layers(anatomy, paths, self.layers, outside=self.outside)
        if not selected:
            raise SiteError(
                f"this {anatomy.backbone.model_type} backbone has no normalization layer with "
                f"parameters in layers {self.layers!r}",
                hint="bitfit" if self.layers == "all" else "bitfit, or norms(layers=all)",
            )
        return selected


def norm_parameters(anatomy: Anatomy) -> list[str]:
    """Return the paths of the parameters of all normalization layers, in the backbone's order."""
    # In a transformer, only norms have one-dimensional weights.
    parameters = anatomy.parameters()
    weights = [path for path, p in parameters.items() if path.endswith(".weight") and p.ndim == 1]
    norms = {path.rpartition(".")[0] for path in weights}
    return [path for path in parameters if path.rpartition(".")[0] in norms]

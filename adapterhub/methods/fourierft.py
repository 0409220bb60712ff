"""FourierFT: the update of a projection is the inverse Fourier transform of a few coefficients.

    y = W x + s Re(F^-1(E)) x                                                     (equations 2 to 4)

    x: (..., d_in)    E: (d_out, d_in), zero but at n places    s: scale

F^-1 is the discrete transform in two dimensions. The places are drawn from a seed and the site. E
is zero at first, so the initial update is zero. The transform is computed for each call in
training: it costs more than the product with W where there are few tokens.

Parameters: n per site: `coefficients`, at most d_in d_out.

Gao et al. 2024, "Parameter-Efficient Fine-Tuning with Discrete Fourier Transform", section 3,
https://arxiv.org/abs/2405.03003.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.experts import AtExperts
from adapterhub.methods.common.generated import PlacedNumbers
from adapterhub.methods.common.ops import DeltaModule, wide


class SpectralUpdate(DeltaModule):
    """The map (x, y) -> y + s Re(F^-1(E)) x."""

    def __init__(
        self, name: str, site: Site, count: int, scale: float, seed: int, stored: bool
    ) -> None:
        super().__init__()
        shape = (site.d_out, site.d_in)
        self.E = PlacedNumbers(f"{name}.{site.id}", seed, count, shape, stored)
        self.scale = scale

    def delta(self) -> Tensor:
        """Return s Re(F^-1(E)): (d_out, d_in)."""
        transformed: Tensor = torch.fft.ifft2(wide(self.E.matrix()))
        return self.scale * transformed.real


@register_method
@dataclass(frozen=True)
class FourierFT(AtExperts):
    """Updates of projections by a few Fourier coefficients."""

    sized_by = "coefficients"
    name = "fourierft"
    paper = "Gao et al. 2024, https://arxiv.org/abs/2405.03003"
    summary = "updates of projections by a few Fourier coefficients"
    learning_rate = 5e-2

    coefficients: int = option(1000, "coefficients per site; at most all", least=1)
    scale: float = option(150.0, "factor s of the update")
    seed: int = option(0, "number that the places are drawn from")
    stored: bool = option(False, "the places are in the file")

    @classmethod
    def example(cls) -> FourierFT:
        """Return the method at a scale for narrow backbones."""
        return cls(coefficients=64, scale=20.0)

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> SpectralUpdate:
        """Return the update of one site."""
        count = self.size(site, rank)
        return SpectralUpdate(self.name, site, count, self.scale, self.seed, self.stored)

    def size(self, site: Site, rank: int) -> int:
        """Return the number of coefficients."""
        return min(self.coefficients, site.d_in * site.d_out)

"""WaveFT: the update of a projection is the inverse wavelet transform of a few coefficients.

    y = W x + s F^-1(E) x                                                            (section 3)

    x: (..., d_in)    E: (d_out, d_in), zero but at n places    s: scale

F^-1 is one level of the inverse Haar transform in two dimensions: each coefficient changes a block
of two by two entries of W. An odd size is computed with one more, and cut. The places are drawn
from a seed and the site. E is zero at first, so the initial update is zero.

Parameters: n per site: `coefficients`, at most d_in d_out.

Bilican et al. 2025, "Exploring Sparsity for Parameter Efficient Fine Tuning Using Wavelets",
section 3, https://arxiv.org/abs/2505.12532.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.fourierft import FourierFT, SpectralUpdate


def inverse_haar(coefficients: Tensor) -> Tensor:
    """Return one level of the inverse transform: (2 m, 2 n) -> (2 m, 2 n)."""
    (mean, down), (across, both) = (h.chunk(2, 1) for h in coefficients.chunk(2, 0))
    rows = [
        torch.stack([mean + across + s * (down + both), mean - across + s * (down - both)], -1)
        for s in (1, -1)
    ]
    return torch.stack(rows, 1).flatten(2).flatten(0, 1) / 2


class WaveletUpdate(SpectralUpdate):
    """The map (x, y) -> y + s F^-1(E) x."""

    def delta(self) -> Tensor:
        """Return s F^-1(E): (d_out, d_in)."""
        d_out, d_in = self.E.shape
        padded = F.pad(self.E.matrix(), (0, d_in % 2, 0, d_out % 2))
        return self.scale * inverse_haar(padded)[:d_out, :d_in]


@register_method
@dataclass(frozen=True)
class WaveFT(FourierFT):
    """Updates of projections by a few wavelet coefficients."""

    name = "waveft"
    paper = "Bilican et al. 2025, https://arxiv.org/abs/2505.12532"
    summary = "updates of projections by a few wavelet coefficients"
    learning_rate = 1e-3

    coefficients: int = option(2592, "coefficients per site; at most all", least=1)
    scale: float = option(25.0, "factor s of the update")

    @classmethod
    def example(cls) -> WaveFT:
        """Return the method at a scale for narrow backbones."""
        return cls(coefficients=64, scale=2.0)

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> WaveletUpdate:
        """Return the update of one site."""
        count = self.size(site, rank)
        return WaveletUpdate(self.name, site, count, self.scale, self.seed, self.stored)

"""GLoRA: a weight and a bias are scaled and shifted by matrices, vectors or numbers.

    y = (W + W * A + B) x + b + b * D + E + W C

    x: (..., d_in)    A, B: (d_out, d_in)    C: (d_in,)    D, E: (d_out,)

Each of A to E is a product of `rank`, a vector, a number, or absent (none): A and B have one form,
`weights`, C has `prompt`, and D and E have `biases`. One factor of a product is Kaiming-uniform;
everything else is zero at first, so the initial update is zero. Where a projection lacks a bias, C,
D and E are omitted. W is read in each call: merge before serving.

Parameters: by default 2 rank (d_in + d_out) per site, and rank (d_in + 1) + 2 with a bias.

Chavan et al. 2023, "One-for-All: Generalized LoRA for Parameter-Efficient Fine-tuning",
https://arxiv.org/abs/2306.07967.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.errors import SiteError
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.ops import cast
from adapterhub.methods.common.projections import RankMethod, has_bias, weight_at
from adapterhub.methods.common.site_module import OutputModule


class Support(nn.Module):
    """A matrix, (rows, columns): a product, or one column or number for all; zero at first."""

    def __init__(self, form: str, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.value: nn.Parameter | None = None
        if form == "lora":
            self.left = nn.Parameter(torch.zeros(rows, rank))
            self.right = nn.Parameter(torch.empty(rank, columns))
            nn.init.kaiming_uniform_(self.right, a=math.sqrt(5))
        else:
            self.value = nn.Parameter(torch.zeros((rows, 1) if form == "vector" else 1))

    def forward(self) -> Tensor:
        """Return the matrix, or a tensor that broadcasts to it."""
        return self.left @ self.right if self.value is None else self.value


class ScaledShiftedWeight(OutputModule):
    """The map (x, y, W, b) -> y + (W * A + B) x + b * D + E + W C."""

    affine = True
    reads_weight = True

    def forward(  # type: ignore[override]
        self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Compute the new output, like y.

        x: (..., d_in), y: (..., d_out), weight: (d_out, d_in), bias: (d_out,) or None.
        """
        parts = dict(self.named_children())
        if "A" in parts:
            delta = weight * parts["A"]() + parts["B"]()
            y = y + F.linear(x, cast(delta, x)).to(y.dtype)
        if "C" in parts:
            column: Tensor = parts["C"]()
            y = y + F.linear(column.flatten(), cast(weight, column)).to(y.dtype)
        if "D" in parts:
            assert bias is not None
            y = y + (bias * parts["D"]().flatten() + parts["E"]().flatten()).to(y.dtype)
        return y


Form = Literal["lora", "vector", "constant", "none"]


@register_method
@dataclass(frozen=True)
class GLoRA(RankMethod):
    """Weights and biases that are scaled and shifted."""

    name = "glora"
    paper = "Chavan et al. 2023, https://arxiv.org/abs/2306.07967"
    summary = "weights and biases of projections, scaled and shifted"
    learning_rate = 1e-3

    weights: Form = option("lora", "form of A and B")
    prompt: Literal["lora", "vector", "none"] = option("lora", "form of C")
    biases: Literal["vector", "constant", "none"] = option("constant", "form of D and E")

    @classmethod
    def example(cls) -> GLoRA:
        """Return the method for narrow projections, without D: a bias of zero does not train it."""
        return cls(rank=4, biases="none")

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> ScaledShiftedWeight:
        """Return the update of one site.

        Raises:
            SiteError: no part of A to E is left there.
        """
        weight_at(site, anatomy)  # that each forward pass reads
        module = ScaledShiftedWeight()
        if not (parts := self._parts(site, anatomy)):
            raise SiteError(f"glora changes nothing at {site.id}", hint="glora(weights=lora)")
        for name, form, (rows, columns) in parts:
            module.add_module(name, Support(form, rows, columns, rank))
        return module

    def _parts(self, site: Site, anatomy: Anatomy) -> list[tuple[str, str, tuple[int, int]]]:
        """Return the name, form and shape of each part of a site."""
        whole, biased = (site.d_out, site.d_in), has_bias(site, anatomy)
        parts = [(name, self.weights, whole) for name in "AB"]
        parts += [("C", self.prompt, (site.d_in, 1))] if biased else []
        parts += [(name, self.biases, (site.d_out, 1)) for name in "DE"] if biased else []
        return [part for part in parts if part[1] != "none"]

    def count(self, anatomy: Anatomy) -> int:
        """Sum rank (rows + columns), rows or 1 over the parts of the sites."""
        return sum(
            {"lora": rank * (rows + columns), "vector": rows, "constant": 1}[form]
            for site, rank in self.ranks_by_site(anatomy).items()
            for _, form, (rows, columns) in self._parts(site, anatomy)
        )

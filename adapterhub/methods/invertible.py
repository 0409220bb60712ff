"""Invertible adapters: the states behind the embeddings are changed, and restored at the end.

    y1 = x1 + f(x2)    y2 = x2 + g(y1)        behind the embeddings               (section 3.3)
    x2 = y2 - g(y1)    x1 = y1 - f(x2)        in front of the output layer: the inverse

    x1, x2: the first and the second half of the states x, (tokens, d)
    f, g: up(relu(down)), from one half to the other, with a hidden layer of half its width

This is additive coupling, which is invertible for any f and g (NICE). The output layer of a
language model scores states against its table of tokens, often the table of the embeddings, so the
same network reverts their change. A model without an output layer has only the first part, so a
file fits both: an adapter trained on masked tokens is used below a classifier.

`undone=False` keeps the change there, like the library `adapters` with the model classes of
transformers (its own classes, with flexible heads, revert it).

Of two stacks the encoder's embeddings are changed, and the states that the decoder's output layer
reads. up is zero at first, so the states are unchanged. They are as wide as the embeddings, also
where layers are wider.

Parameters: with h1 = d // 2 and h2 = d - h1, networks from n to m numbers with hidden layers of
n // reduction: (n // reduction) (n + 1 + m) + m, for (h2, h1) and (h1, h2).

Pfeiffer et al. 2020, "MAD-X: An Adapter-Based Framework for Multi-Task Cross-Lingual Transfer",
section 3.3, https://arxiv.org/abs/2005.00052; Dinh et al. 2015, "NICE: Non-linear Independent
Components Estimation", section 3.2, https://arxiv.org/abs/1410.8516.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.errors import SiteError
from adapterhub.methods.common.base import Method, Placement, activation_module, register_method
from adapterhub.methods.common.ops import cast
from adapterhub.methods.common.site_module import InputModule, SharedModule


class HalfNetwork(nn.Module):
    """The map from one half of the states to a change of the other: up(f(down x)), at first 0."""

    def __init__(self, d_in: int, d_out: int, reduction: int, activation: str) -> None:
        super().__init__()
        self.down = nn.Linear(d_in, max(d_in // reduction, 1))
        self.activation = activation_module(activation)
        self.up = nn.Linear(self.down.out_features, d_out)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the change. x: (..., d_in) -> (..., d_out), in the dtype of x."""
        hidden = F.linear(x, cast(self.down.weight, x), cast(self.down.bias, x))
        hidden = self.activation(hidden)
        change = F.linear(hidden, cast(self.up.weight, hidden), cast(self.up.bias, hidden))
        return change.to(x.dtype)


class Coupling(SharedModule):
    """The map x -> y and its inverse."""

    def __init__(self, width: int, reduction: int, activation: str) -> None:
        super().__init__()
        first = width // 2
        self.sizes = [first, width - first]
        self.f = HalfNetwork(width - first, first, reduction, activation)
        self.g = HalfNetwork(first, width - first, reduction, activation)

    def forward(self, x: Tensor) -> Tensor:
        """Compute y = [x1 + f(x2), x2 + g(y1)]. x: (..., d) -> y like x."""
        first, second = torch.split(x, self.sizes, dim=-1)
        first = first + self.f(second)
        return torch.cat([first, second + self.g(first)], dim=-1)

    def inverse(self, y: Tensor) -> Tensor:
        """Compute x from y, like y."""
        first, second = torch.split(y, self.sizes, dim=-1)
        second = second - self.g(first)
        return torch.cat([first - self.f(second), second], dim=-1)


class CoupledStates(InputModule):
    """Change the states behind the embeddings."""

    def __init__(self, coupling: Coupling) -> None:
        super().__init__()
        self.coupling = coupling

    def forward(self, x: Tensor) -> Tensor:
        """Couple states. x: (..., d) -> x' like x."""
        coupled: Tensor = self.coupling(x)
        return coupled


class RestoredStates(InputModule):
    """Apply the inverse of another site's coupling in front of the output layer."""

    def __init__(self, coupling: Coupling) -> None:
        super().__init__()
        self.shared = [coupling]  # in a list, so that each of its tensors has one name

    def forward(self, x: Tensor) -> Tensor:
        """Restore states. x: (..., d) -> x' like x."""
        (coupling,) = self.shared
        device = coupling.f.up.bias.device  # the device of the embeddings, if a model is on several
        return coupling.inverse(x.to(device)).to(x.device)


@register_method
@dataclass(frozen=True)
class Invertible(Method):
    """Invertible adapters of the embeddings."""

    sized_by = "reduction"
    name = "invertible"
    paper = "Pfeiffer et al. 2020, https://arxiv.org/abs/2005.00052"
    summary = "an invertible change of the embeddings, undone in front of the output layer"

    reduction: int = option(2, "each network's input width divided by its hidden width", least=1)
    activation: str = option("relu", "activation function, by its transformers name")
    undone: bool = option(True, "undo the change in front of the output layer")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield the coupling behind the embeddings, and its inverse if there is an output layer.

        Raises:
            SiteError: the output layer reads states of another width than the embeddings.
        """
        site = self.site(anatomy)
        coupling = Coupling(site.d_out, self.reduction, self.activation)
        yield Placement(site, CoupledStates(coupling))
        if not self.undone:
            return
        for output in (s for s in anatomy.sites.values() if s.role == "output"):
            if output.d_in != site.d_out:
                raise SiteError(
                    f"embeddings of {site.d_out} numbers cannot be restored in front of the output "
                    f"layer at {output.host}, which reads {output.d_in}",
                    expected="an output layer as wide as the embeddings",
                    hint="pfeiffer, which changes layers alone",
                )
            yield Placement(output, RestoredStates(coupling))

    def count(self, anatomy: Anatomy) -> int:
        """Sum the sizes of the two networks."""
        width = self.site(anatomy).d_out
        first = width // 2
        halves = ((width - first, first), (first, width - first))
        hidden = [(max(n // self.reduction, 1), n, m) for n, m in halves]
        return sum(h * (n + 1 + m) + m for h, n, m in hidden)

    def site(self, anatomy: Anatomy) -> Site:
        """Return the site behind the embeddings: of the first stack that reads tokens."""
        return anatomy.select(("input",))[0]

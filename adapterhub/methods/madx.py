"""MAD-X language adapters: bottlenecks in every layer, and an invertible adapter of the embeddings.

    input:   y1 = x1 + f(x2), y2 = x2 + g(y1)    undone in front of the output layer
    ffn:     y' = y + up(relu(down(y)))

    x1, x2: the halves of the states behind the embeddings    f, g: as in `invertible`
    down: d -> size, up: size -> d, both with bias

A composition of `invertible` and `pfeiffer`. A language adapter is trained on text of one language
by masked or causal language modeling. A task adapter is trained on top of it (`on`), and another
language replaces the one below.

Parameters: as for `invertible`, plus 2 d size + size + d per layer.

Pfeiffer et al. 2020, "MAD-X: An Adapter-Based Framework for Multi-Task Cross-Lingual Transfer",
sections 3.1 and 3.3, https://arxiv.org/abs/2005.00052.
"""

from __future__ import annotations

from dataclasses import dataclass

from adapterhub.config.options import option
from adapterhub.methods.bottleneck import Pfeiffer, SequentialSource
from adapterhub.methods.common.base import Layers, Method, register_method
from adapterhub.methods.invertible import Invertible


@register_method
@dataclass(frozen=True)
class MadX(Method):
    """Sequential adapters composed with an invertible adapter of the embeddings."""

    sized_by = "size"
    name = "madx"
    paper = "Pfeiffer et al. 2020, https://arxiv.org/abs/2005.00052"
    summary = "language adapters: pfeiffer + an invertible adapter of the embeddings"
    start = "near-identity"

    size: int = option(64, "bottleneck width", least=1)
    reduction: int = option(2, "halves of the embeddings divided by the hidden width", least=1)
    source: SequentialSource = option(
        "output", "input of the bottlenecks: y (output) or norm(r + y) (block)"
    )
    layers: Layers = option("all", "layers with bottlenecks: all, 'top 4', '0..3', [0, 5]")

    def parts(self) -> tuple[Method, ...]:
        """Return the two methods."""
        adapter = Pfeiffer(size=self.size, source=self.source, layers=self.layers)
        return Invertible(reduction=self.reduction), adapter

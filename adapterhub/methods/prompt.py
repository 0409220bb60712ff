"""Prompt tuning: learned virtual tokens in front of the input.

    stack([P; E(tokens)])                                                            (section 2)

    P: (length, d), initialized with random rows of the embedding table    E: the frozen embedding

In an encoder-decoder the prompt is in front of the encoder's input, and the decoder attends to it.
Where a row has padding on the left, the prompt comes behind it, next to the text. With
`counts_padding` it comes in front of the padding, which counts as text: in positions, and where a
classifier reads the last token. That is how peft computes. Packed rows, masks that cannot be
extended and caches that were filled without the prompt are refused.

Parameters: length d.

Lester et al. 2021, "The Power of Scale for Parameter-Efficient Prompt Tuning", section 2,
https://arxiv.org/abs/2104.08691; section 3.2 compares initializations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.backbones.weights import device_of
from adapterhub.config.options import option
from adapterhub.methods._base import Method, Placement, register_method
from adapterhub.methods._site_module import EmbeddingModule
from adapterhub.methods._sites import select_sites


class VirtualTokens(EmbeddingModule):
    """Returns the prompt P."""

    def __init__(self, initial: Tensor, counts_padding: bool = False) -> None:
        super().__init__()
        self.prompt = nn.Parameter(initial)
        self.counts_padding = counts_padding

    def forward(self) -> Tensor:
        """Return the virtual tokens: (length, d)."""
        return self.prompt


@register_method
@dataclass(frozen=True)
class Prompt(Method):
    """Learned virtual tokens in front of the input."""

    sized_by = "length"
    name = "prompt"
    paper = "Lester et al. 2021, https://arxiv.org/abs/2104.08691"
    summary = "learned virtual tokens in front of the input"
    start = "paper"
    learning_rate = 3e-2

    length: int = option(20, "prompt length in tokens", least=1)
    sites: tuple[str, ...] = option(("embed",), "stack to adapt; of two, the encoder")
    counts_padding: bool = option(False, "padding of the text counts as text, as in peft")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one prompt, at the input."""
        site = self.site(anatomy)
        yield Placement(site, VirtualTokens(self._initial(anatomy), self.counts_padding))

    def count(self, anatomy: Anatomy) -> int:
        """Return length d."""
        return self.length * self.site(anatomy).d_out

    def site(self, anatomy: Anatomy) -> Site:
        """Return the site of the input: of the first stack that takes tokens."""
        return select_sites(self, anatomy, "embed")[0]

    def _initial(self, anatomy: Anatomy) -> Tensor:
        # Call the embedding module, since some modules scale the rows of their weight.
        embedding: Any = anatomy.model.get_input_embeddings()
        rows = torch.randint(embedding.num_embeddings, (self.length,))
        with torch.no_grad():
            initial: Tensor = embedding(rows.to(device_of(embedding)))
        return initial.detach().float().clone()

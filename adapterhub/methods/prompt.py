"""Prompt tuning: learned virtual tokens in front of the input.

    stack([P; E(tokens)])                                                            (section 2)

    P: (length, d), initialized with random rows of the embedding table, or with tokens of `text`,
    repeated up to the length    E: the frozen embedding

In an encoder-decoder the prompt is in front of the encoder's input, and the decoder attends to it.
In a row with padding on the left, the prompt follows the padding, next to the text. With
`counts_padding` it precedes the padding, which counts as text, in positions and where a classifier
reads the last token, as in peft. Packed rows, masks that cannot be extended and caches that were
filled without the prompt are refused.

Parameters: length d.

Lester et al. 2021, "The Power of Scale for Parameter-Efficient Prompt Tuning", section 2,
https://arxiv.org/abs/2104.08691; section 3.2 compares initializations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adapterhub.anatomy.backbone import device_of
from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import Method, Placement, register_method
from adapterhub.methods.common.projections import select_sites
from adapterhub.methods.common.site_module import EmbeddingModule, init_is_skipped
from adapterhub.methods.common.texts import token_ids


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
    training_options: ClassVar[tuple[str, ...]] = ("text",)

    length: int = option(20, "prompt length in tokens", least=1)
    sites: tuple[str, ...] = option(("embed",), "stack to adapt; of two, the encoder")
    counts_padding: bool = option(False, "padding of the text counts as text, as in peft")
    text: str = option(
        "", "text to start from: its embeddings, repeated up to the length", omitted=True
    )

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one prompt, at the input."""
        site = self.site(anatomy)
        yield Placement(site, VirtualTokens(self._initial(anatomy), self.counts_padding))

    def count(self, anatomy: Anatomy) -> int:
        """Return length d."""
        return self.length * self.site(anatomy).d_out

    def inference_form(self) -> Prompt:
        """Return the prompt without the text that it started from."""
        return replace(self, text="")

    def site(self, anatomy: Anatomy) -> Site:
        """Return the site of the input: of the first stack that takes tokens."""
        return select_sites(self, anatomy, "embed")[0]

    def _initial(self, anatomy: Anatomy) -> Tensor:
        # Call the embedding module, since some modules scale the rows of their weight.
        embedding: Any = anatomy.backbone.input_embedding
        rows = torch.randint(embedding.num_embeddings, (self.length,))
        if self.text and not init_is_skipped():
            ids = token_ids(anatomy, self.text)
            rows = ids.repeat(-(-self.length // len(ids)))[: self.length]
        with torch.no_grad():
            initial: Tensor = embedding(rows.to(device_of(embedding)))
        return initial.detach().float().clone()

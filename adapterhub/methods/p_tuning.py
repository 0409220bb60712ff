"""P-tuning: virtual tokens in front of the input, computed by a network during training.

    stack([h(P); E(tokens)])                                                       (section 3.2)

    P: (length, d), N(0, 1)    h: (length, d) -> (length, d), the prompt encoder    E: frozen
    mlp:   h = W3 relu(W2 relu(W1 P))                    W1: (middle, d)    W2: (middle, middle)
    lstm:  h = W2 relu(W1 LSTM(P))                       W1: (2 middle, 2 middle)
    LSTM: bidirectional, with two layers of width middle

The LSTM is the paper's encoder, the MLP a cheaper one. Adapter files contain a plain prompt,
without the network.

Parameters: during training length d and the network, where each matrix has a bias;
afterwards length d.

Liu et al. 2021, "GPT Understands, Too", section 3.2, https://arxiv.org/abs/2103.10385.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy
from adapterhub.config.options import option
from adapterhub.errors import ConfigError
from adapterhub.methods.common.base import Placement, register_method
from adapterhub.methods.common.site_module import EmbeddingModule
from adapterhub.methods.prompt import Prompt, VirtualTokens

Encoder = Literal["mlp", "lstm"]


class PromptEncoder(EmbeddingModule):
    """Compute the prompt h(P)."""

    def __init__(
        self,
        length: int,
        width: int,
        middle: int,
        encoder: Encoder,
        counts_padding: bool = False,
    ) -> None:
        super().__init__()
        self.counts_padding = counts_padding
        self.prompt = nn.Parameter(torch.randn(length, width))
        self.lstm: nn.LSTM | None = None
        if encoder == "lstm":
            self.lstm = nn.LSTM(width, middle, num_layers=2, bidirectional=True)
            self.head = nn.Sequential(
                nn.Linear(2 * middle, 2 * middle), nn.ReLU(), nn.Linear(2 * middle, width)
            )
        else:
            self.head = nn.Sequential(
                nn.Linear(width, middle),
                nn.ReLU(),
                nn.Linear(middle, middle),
                nn.ReLU(),
                nn.Linear(middle, width),
            )

    def forward(self) -> Tensor:
        """Compute the prompt: (length, d)."""
        states = self.prompt if self.lstm is None else self.lstm(self.prompt)[0]
        prompt: Tensor = self.head(states)
        return prompt

    def inference_form(self) -> VirtualTokens:
        """Return the current prompt, without the network."""
        with torch.no_grad():
            return VirtualTokens(self(), self.counts_padding)


@register_method
@dataclass(frozen=True)
class PTuning(Prompt):
    """Virtual tokens, computed by a network during training."""

    name = "p-tuning"
    paper = "Liu et al. 2021, https://arxiv.org/abs/2103.10385"
    summary = "virtual tokens in front of the input, computed by a network during training"
    learning_rate = 1e-3

    encoder: Encoder = option("mlp", "network that computes the prompt")
    middle: int | None = option(
        None, "hidden width of the network (null: embedding width)", least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text:
            raise ConfigError(
                "text: a network computes the prompt, which starts from no text",
                hint="prompt(text=...)",
            )

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one prompt, at the input."""
        site = self.site(anatomy)
        middle = self.middle or site.d_out
        module = PromptEncoder(self.length, site.d_out, middle, self.encoder, self.counts_padding)
        yield Placement(site, module)

    def count(self, anatomy: Anatomy) -> int:
        """Add up length d and the parameters of the network."""
        d = self.site(anatomy).d_out
        h = self.middle or d
        if self.encoder == "mlp":
            return self.length * d + h * (d + 1) + h * (h + 1) + d * (h + 1)
        lstm = 2 * 4 * h * (d + h + 2) + 2 * 4 * h * (3 * h + 2)
        return self.length * d + lstm + 2 * h * (2 * h + 1) + d * (2 * h + 1)

    def inference_form(self) -> Prompt:
        """Return plain prompt tuning."""
        return Prompt(self.length, self.sites, self.counts_padding)

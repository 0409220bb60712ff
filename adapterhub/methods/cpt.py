"""CPT, "context-aware prompt tuning": virtual tokens that stay near the tokens of examples.

    stack([P; E(tokens)]),   |P_i - P0_i| <= epsilon sqrt(d / 2048),   for each virtual token i

    P: (length, d)    P0: the embeddings of `text`, where P starts    E: the frozen embedding

The examples are the `text`: format them like the rows of the task, and set the length to their
number of tokens. After each step of the optimizer, a change that is too long is shortened to its
bound, so that the prompt does not overfit to a few rows. The loss is the task's loss; the paper
also learns the labels of the examples, and does not change them. Files contain P, like the files of
`prompt`.

Parameters: length d.

Blau et al. 2024, "Context-aware Prompt Tuning: Advancing In-Context Learning with Adversarial
Methods", section 3, https://arxiv.org/abs/2410.17222.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adapterhub.anatomy.sites import Anatomy
from adapterhub.config.options import option
from adapterhub.methods.common.base import Placement, register_method
from adapterhub.methods.prompt import Prompt, VirtualTokens


class BoundedPrompt(VirtualTokens):
    """Return the prompt P, which stays near P0."""

    start: Tensor

    def __init__(self, initial: Tensor, counts_padding: bool = False) -> None:
        super().__init__(initial, counts_padding)
        self.register_buffer("start", initial.clone())

    def bound(self, size: float) -> None:
        """Shorten the changes that are longer than `size`."""
        self.prompt.copy_(self.start + torch.renorm(self.prompt - self.start, 2, 0, size))

    def inference_form(self) -> VirtualTokens:
        """Return the current prompt."""
        return VirtualTokens(self.prompt.detach(), self.counts_padding)


@register_method
@dataclass(frozen=True)
class CPT(Prompt):
    """Virtual tokens that stay near the tokens of examples."""

    name = "cpt"
    paper = "Blau et al. 2024, https://arxiv.org/abs/2410.17222"
    summary = "virtual tokens that stay near the examples' tokens"
    learning_rate = 1e-3
    training_options: ClassVar[tuple[str, ...]] = ("text", "epsilon")

    epsilon: float = option(0.1, "most change of a token, for 2,048 hidden units", least=0)

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one prompt, at the input."""
        site = self.site(anatomy)  # refuses inputs without token embeddings
        yield Placement(site, BoundedPrompt(self._initial(anatomy), self.counts_padding))

    def stepped(self, modules: Sequence[BoundedPrompt], done: float) -> None:
        """Shorten vectors that are longer than their bounds."""
        for module in modules:
            module.bound(self.epsilon * (module.prompt.shape[1] / 2048) ** 0.5)

    def inference_form(self) -> Prompt:
        """Return plain prompt tuning."""
        return Prompt(self.length, self.sites, self.counts_padding)

"""Preference tuning: a language model learns to prefer one response to another.

    example      a prompt, the chosen and the rejected response
    row          the tokens of both responses, each after the prompt; their reference
    prediction   a response to the prompt
    metrics      accuracy and margin of the rewards, and the loss

With `loss_type=kto` an example has one response and a mark: liked or disliked.

The reward of a response is beta (log p - log r): its log probability, compared with its log
probability under the reference, the model with the adapter off (Rafailov et al. 2023, section 4,
https://arxiv.org/abs/2305.18290). The reference is computed once, before the first step, so methods
that change the backbone's own parameters do not need a second model. If a run starts from an
adapter (`--from`), the reference is the model with that adapter; `adapterhub eval`, which lacks it,
compares with the model without an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from adapterhub.data.chat_formats import Message
from adapterhub.data.options import DataOptions
from adapterhub.data.text_pairs import Comparison
from adapterhub.tasks.causal_lm import CausalLM
from adapterhub.tasks.common.base import Encoded, Prediction, register_task
from adapterhub.tasks.common.batches import (
    IGNORED,
    OF_LOSS,
    Loss,
    Passed,
    Row,
    Setting,
    each_row,
    response_log_probabilities,
)
from adapterhub.tasks.common.language_models import Generation
from adapterhub.tasks.common.preference_losses import (
    LossOptions,
    Responses,
    next_token,
)
from adapterhub.tasks.common.preference_pairs import Compared, OfComparisons, Rated

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

LABELS, REFERENCE, LIKED = f"{OF_LOSS}labels", f"{OF_LOSS}reference", f"{OF_LOSS}liked"


@register_task
@dataclass(frozen=True)
class Preference(LossOptions, Generation, OfComparisons):
    """The better of two responses to a prompt, learned by a language model.

    Rows of `train.jsonl`:

        {"prompt": "Name a prime number.", "chosen": "7", "rejected": "Nine, I think."}
        {"prompt": "Name an even number.", "chosen": "12", "rejected": "7"}

    The responses, and the prompt, may be lists of messages, each with a role and a content. If
    `chosen` and `rejected` are whole chats, there is no prompt.

    With `loss_type=kto`, rows are rated responses (pairs are split into two of them):

        {"prompt": "Name a prime number.", "completion": "7", "label": true}
        {"prompt": "Name an even number.", "completion": "Nine.", "label": false}

    `predict` prints a generated response:

        7
        {"generated": "7"}
    """

    name = "preference"
    head = "causal-lm"
    summary = "which of two responses is better, or whether one is good: DPO, SimPO, KTO and others"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_loss()

    @property
    def language(self) -> CausalLM:
        """The task that encodes a prompt with one response, and generates."""
        return replace(super().language, new_tokens=self.new_tokens, beams=self.beams)

    @property
    def compares_with_reference(self) -> bool:
        """Return whether the loss reads the reference."""
        return self.kind.reference

    # Examples

    def example(self, fields: Sequence[str], options: DataOptions) -> Comparison:
        """Build a prompt, or a chat with one user message."""
        return Comparison((("user", fields[0]),) if self.data == "chat" else fields[0])

    def chat_example(self, messages: tuple[Message, ...]) -> Comparison | None:
        """Build a chat, if the tokenizer's chat template formats prompts."""
        return Comparison(messages) if self.language.chat_example(messages) else None

    # Rows

    def encode(
        self, examples: Sequence[Comparison], setting: Setting, *, labelled: bool
    ) -> Encoded:
        """Encode both responses of each comparison; without `labelled` only the prompt."""
        if labelled:
            return super().encode(examples, setting, labelled=labelled)
        prompts = [self.asked(example, setting) for example in examples]
        encoded = self.language.encode(prompts, setting, labelled=False)
        return replace(encoded, task=self, examples=tuple(examples))

    def with_reference(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> Encoded:
        """Return rows with the log probabilities of both responses under a model."""
        if not self.compares_with_reference:
            return data

        def read(passed: Passed) -> list[list[float]]:
            policy, _ = _log_probabilities(passed.output, passed.batch)
            pairs: list[list[float]] = policy.tolist()
            return pairs

        references = each_row(model, data, batch_size, read)
        rows = [
            row | {"reference": reference}
            for row, reference in zip(data.rows, references, strict=True)
        ]
        return replace(data, rows=rows)

    def collate(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """Pad all chosen responses, and then all rejected ones: (2 batch, tokens)."""
        if "responses" not in rows[0]:
            return super().collate(rows, setting)
        import torch

        batch = self.stacked(rows, setting)
        facts = {LABELS: batch.pop("labels")}
        if "reference" in rows[0]:
            facts = {REFERENCE: torch.tensor([row["reference"] for row in rows])} | facts
        if self.rated:
            facts = {LIKED: torch.tensor([row["liked"] for row in rows])} | facts
        return facts | batch

    def loss(self, train: Encoded) -> Loss | None:
        """Return the mean loss of the comparisons of a batch."""
        return lambda output, batch: self._losses(_responses_of(output, batch)).mean()

    def _losses(self, responses: Responses) -> Tensor:
        """Return the loss of each row: (batch,)."""
        losses = self.kind.compute(responses, self)
        weight = self.kind.sft_weight if self.sft_weight is None else self.sft_weight
        return losses + weight * next_token(responses) if weight else losses

    def stops(self, setting: Setting) -> list[int]:
        """Return the token after a response."""
        return self.language.stops(setting)

    def remarks(self, data: Encoded) -> tuple[str, ...]:
        """List unused keys of messages; warn if no response ends."""
        return (*super().remarks(data), *self.language.endless_note(data.setting))

    # Predictions

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Generate a response to each prompt."""
        prompts = [self.asked(example, data.setting) for example in data.examples]
        encoded = self.language.encode(prompts, data.setting, labelled=False)
        return self.language.predict(model, encoded, batch_size)

    def compared(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Return the rewards of both responses of each comparison, and their losses."""

        def read(passed: Passed) -> Iterator[Prediction]:
            responses = _responses_of(passed.output, passed.batch)
            losses = self._losses(responses).tolist()
            against = responses.policy
            if self.compares_with_reference:
                against = responses.ratios
            elif self.kind.per_token:
                against = against / responses.tokens
            rewards = (self.beta * against).tolist()
            for (first, second), loss in zip(rewards, losses, strict=True):
                yield Rated(first, loss) if self.rated else Compared(first, second, loss)

        return each_row(model, data, batch_size, read)


def _responses_of(output: Any, batch: Mapping[str, Tensor]) -> Responses:
    """Return the log probabilities of the responses of a batch, and what losses compare them with.

    Without a reference, it has the probability 1.
    """
    policy, tokens = _log_probabilities(output, batch)
    reference = batch.get(REFERENCE, policy.new_zeros(()))
    return Responses(policy, reference, tokens, batch.get(LIKED))


def _log_probabilities(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the log probabilities of the responses, and their numbers of tokens: (batch, 2)."""
    labels = batch[LABELS]
    logits = output.logits[:, -labels.shape[1] :]
    sums = response_log_probabilities(logits, labels)
    tokens = (labels[:, 1:] != IGNORED).sum(-1)
    return sums.view(2, -1).T, tokens.view(2, -1).T.clamp(min=1)

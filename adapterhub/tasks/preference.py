"""Preference tuning: a language model learns to prefer one response to another.

    example      a prompt, the chosen and the rejected response
    row          the tokens of both responses, each after the prompt; their reference
    prediction   a response to the prompt
    metrics      accuracy and margin of the rewards, and the loss

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
from typing import TYPE_CHECKING, Any, Literal

from adapterhub.config.options import option
from adapterhub.data.chat_formats import Message
from adapterhub.data.options import DataOptions
from adapterhub.data.text_pairs import Comparison
from adapterhub.errors import ConfigError
from adapterhub.tasks.causal_lm import CausalLM
from adapterhub.tasks.common.base import Encoded, Prediction, register_task
from adapterhub.tasks.common.batches import (
    IGNORED,
    OF_LOSS,
    Loss,
    Passed,
    Row,
    Setting,
    dpo_loss,
    each_row,
    ipo_loss,
    orpo_loss,
    response_log_probabilities,
)
from adapterhub.tasks.common.language_models import Generation
from adapterhub.tasks.common.preference_pairs import Compared, OfComparisons

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

LABELS, REFERENCE = f"{OF_LOSS}labels", f"{OF_LOSS}reference"


@register_task
@dataclass(frozen=True)
class Preference(Generation, OfComparisons):
    """The better of two responses to a prompt, learned by a language model.

    Rows of `train.jsonl`:

        {"prompt": "Name a prime number.", "chosen": "7", "rejected": "Nine, I think."}
        {"prompt": "Name an even number.", "chosen": "12", "rejected": "7"}

    The responses, and the prompt, may be lists of messages, each with a role and a content. If
    `chosen` and `rejected` are whole chats, there is no prompt.

    `predict` prints a generated response:

        7
        {"generated": "7"}
    """

    loss_type: Literal["dpo", "ipo", "orpo"] = option(
        "dpo", "dpo, ipo, or orpo, which has no reference and also learns the chosen responses"
    )
    beta: float = option(0.1, "how much the distance from the reference costs (orpo: lambda)")
    label_smoothing: float = option(0.0, "the probability that a label is wrong (dpo)")

    name = "preference"
    head = "causal-lm"
    summary = "which of two responses is better: DPO, IPO, ORPO"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta > 0 or not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"beta is {self.beta}, label_smoothing is {self.label_smoothing}",
                expected="beta above 0, and label_smoothing from 0 to less than 0.5",
            )

    @property
    def language(self) -> CausalLM:
        """The task that encodes a prompt with one response, and generates."""
        return replace(super().language, new_tokens=self.new_tokens, beams=self.beams)

    @property
    def compares_with_reference(self) -> bool:
        """Return whether the loss reads the reference."""
        return self.loss_type != "orpo"

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

        found = each_row(model, data, batch_size, read)
        rows = [
            row | {"reference": reference} for row, reference in zip(data.rows, found, strict=True)
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
        return facts | batch

    def loss(self, train: Encoded) -> Loss | None:
        """Return the mean loss of the comparisons of a batch."""
        return lambda output, batch: self._losses(*_log_probabilities(output, batch), batch).mean()

    def _losses(self, policy: Tensor, tokens: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of each comparison.

        `policy` holds the log probabilities of the responses, `tokens` their lengths in tokens:
        (batch, 2).
        """
        if self.loss_type == "orpo":
            return orpo_loss(policy, tokens, self.beta)
        if self.loss_type == "ipo":
            return ipo_loss(policy, batch[REFERENCE], tokens, self.beta)
        return dpo_loss(policy, batch[REFERENCE], self.beta, self.label_smoothing)

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
            batch = passed.batch
            policy, tokens = _log_probabilities(passed.output, batch)
            losses = self._losses(policy, tokens, batch).tolist()
            against = policy / tokens if REFERENCE not in batch else policy - batch[REFERENCE]
            rewards = (self.beta * against).tolist()
            for (chosen, rejected), loss in zip(rewards, losses, strict=True):
                yield Compared(chosen, rejected, loss)

        return each_row(model, data, batch_size, read)


def _log_probabilities(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the log probabilities of the responses, and their numbers of tokens: (batch, 2)."""
    labels = batch[LABELS]
    logits = output.logits[:, -labels.shape[1] :]
    sums = response_log_probabilities(logits, labels)
    tokens = (labels[:, 1:] != IGNORED).sum(-1)
    return sums.view(2, -1).T, tokens.view(2, -1).T.clamp(min=1)

"""Reward models: one number for a response to a prompt, higher for better responses.

    example      a prompt, the chosen and the rejected response
    row          the tokens of both responses, each after the prompt
    prediction   the reward of a response
    metrics      accuracy and margin of the rewards, and the loss

A head with one output, trained with the model of Bradley & Terry, as in Ouyang et al. 2022,
equation 1, https://arxiv.org/abs/2203.02155.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapterhub.config.options import option
from adapterhub.data.options import DataOptions
from adapterhub.data.text_pairs import Comparison, read_comparisons
from adapterhub.errors import DataError
from adapterhub.tasks.classification import Number
from adapterhub.tasks.common.base import POOLING_HELP, Encoded, Pooling, Prediction, register_task
from adapterhub.tasks.common.batches import Loss, Passed, Row, Setting, bradley_terry_loss, each_row
from adapterhub.tasks.common.preference_pairs import Compared, OfComparisons

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@register_task
@dataclass(frozen=True)
class Reward(OfComparisons):
    """One number for a response to a prompt, higher for better responses.

    Rows of `train.jsonl`:

        {"prompt": "Name a prime number.", "chosen": "7", "rejected": "Nine, I think."}
        {"prompt": "Name an even number.", "chosen": "12", "rejected": "7"}

    The responses, and the prompt, may be lists of messages, as for `preference`.

    `predict` prints the reward of a prompt and a response (`--pair`):

        1.204
        {"value": 1.204}
    """

    pooling: Pooling | None = option(None, POOLING_HELP)

    name = "reward"
    head = "regression"
    printed_fields = ("value",)
    summary = "how good a response to a prompt is, learned from comparisons"

    # Examples

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Any]:
        """Read comparisons; without labels, prompts with one response, the chosen one."""
        return read_comparisons(source, options, split, labelled=labelled, chosen=True)

    def example(self, fields: Sequence[str], options: DataOptions) -> Comparison:
        """Build an example of a prompt and a response."""
        if len(fields) < 2:
            raise DataError(
                "the response is missing",
                hint='adapterhub predict ADAPTER "the prompt" --pair "the response"',
            )
        prompt = (("user", fields[0]),) if self.data == "chat" else fields[0]
        return Comparison(prompt, fields[1])

    def fields(self, options: DataOptions) -> int:
        """Return 2: a prompt and a response."""
        return 2

    # Rows

    def encode(
        self, examples: Sequence[Comparison], setting: Setting, *, labelled: bool
    ) -> Encoded:
        """Encode both responses; without `labelled`, only the first."""
        return super().encode(examples, setting, labelled=True)

    def collate(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """Pad all chosen responses, and then all rejected ones: (2 batch, tokens)."""
        batch = self.stacked(rows, setting)
        return {name: tensor for name, tensor in batch.items() if name != "labels"}

    def loss(self, train: Encoded) -> Loss | None:
        """Return the mean loss of the comparisons of a batch."""
        return lambda output, batch: bradley_terry_loss(_rewards(output)).mean()

    # Predictions

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Return the reward of the chosen response."""
        compared = self.compared(model, data, batch_size)
        return [Number(each.chosen) for each in compared if isinstance(each, Compared)]

    def compared(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Return the rewards of both responses of each comparison, and their losses."""

        def read(passed: Passed) -> Iterator[Prediction]:
            rewards = _rewards(passed.output)
            losses = bradley_terry_loss(rewards).tolist()
            for (chosen, rejected), loss in zip(rewards.tolist(), losses, strict=True):
                yield Compared(chosen, rejected, loss)

        return each_row(model, data, batch_size, read)


def _rewards(output: Any) -> Tensor:
    """Return the rewards of the responses, (batch, 2)."""
    rewards: Tensor = output.logits.float().view(2, -1).T
    return rewards

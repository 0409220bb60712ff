"""What tasks have in common that learn from raw text: some of it is hidden, and learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapterhub.data.examples import Example, read_texts
from adapterhub.data.options import DataOptions
from adapterhub.tasks._base import Encoded, Prediction
from adapterhub.tasks._generation import LearnsTokens, WritesTargets, generate

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RawText(LearnsTokens):
    """Examples that are texts, never truncated, and metrics that are losses."""

    outcomes = "losses"
    streams = True

    # Examples

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Example]:
        """Read the texts of a column, or the lines of a text file."""
        return read_texts(source, options, split)

    # Metrics

    def metric_names(self, examples: Sequence[Any]) -> tuple[str, ...]:
        """Return loss and perplexity."""
        return ("loss", "perplexity")

    def metrics(
        self, examples: Sequence[Any], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Return nothing: the metrics come from the loss of the tokens."""
        return {}

    @property
    def evaluates_predictions(self) -> bool:
        """Never: what is predicted has no label."""
        return False

    def outcome(self, example: Example, prediction: Prediction) -> dict[str, Any]:
        """Return the loss of the text."""
        return {"texts": [example.text], **prediction.as_dict()}


@dataclass(frozen=True)
class RestoredText(WritesTargets, RawText):
    """Text that was changed goes in, and an encoder-decoder writes what was lost."""

    @property
    def head(self) -> str:
        """The kind of model: an encoder-decoder."""
        return "seq2seq"

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Generate what is missing in the texts."""
        prompts = self.encode(data.examples, data.setting, labelled=False)
        return list(generate(model, prompts, batch_size, self))

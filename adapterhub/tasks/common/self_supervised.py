"""Code shared by tasks on raw text: part of the text is hidden, and learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from adapterhub.data.examples import Example, read_texts
from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError
from adapterhub.tasks.common.base import Encoded, Prediction
from adapterhub.tasks.common.batches import Row, Setting, limit_of
from adapterhub.tasks.common.language_models import LearnsTokens, WritesTargets, generate

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RawText(LearnsTokens):
    """Examples that are texts, never truncated, and metrics that are losses."""

    outcomes = "losses"
    measures = ("loss", "perplexity")
    streams = True
    evaluates_predictions = False

    # Examples

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Example]:
        """Read the texts of a column, or the lines of a text file."""
        return read_texts(source, options, split)

    # Metrics

    def metrics(
        self, examples: Sequence[Any], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Return nothing: the metrics come from the loss of the tokens."""
        return {}

    def outcome(self, example: Example, prediction: Prediction) -> dict[str, Any]:
        """Return the loss of the text."""
        return {"texts": [example.text], **prediction.as_dict()}


@dataclass(frozen=True)
class RestoredText(WritesTargets, RawText):
    """The input is corrupted text; an encoder-decoder restores it."""

    head = "seq2seq"
    shortest: ClassVar[int] = 1
    """The smallest window that can be corrupted, in tokens."""
    no_windows: ClassVar[str] = "the texts contain no tokens"

    def encode(self, examples: Sequence[Example], setting: Setting, *, labelled: bool) -> Encoded:
        """Cut texts into windows; without `labelled`, keep them whole.

        Raises:
            DataError: no text is long enough for a window.
        """
        encoded = super().encode(examples, setting, labelled=labelled)
        if labelled and not encoded.rows:
            raise DataError(self.no_windows)
        return encoded

    def rows_of(self, example: Example, setting: Setting, *, labelled: bool) -> list[Row]:
        """Return the windows of a text, which `vary` corrupts, or the whole text."""
        tokenizer, limit = setting.tokenizer, limit_of(setting)
        size = self.frame(setting).size(limit)
        if not labelled:
            text = tokenizer(example.text, truncation=True, max_length=limit)
            return [{k: text[k] for k in ("input_ids", "attention_mask")}]
        ids = tokenizer(example.text, add_special_tokens=False)["input_ids"]
        windows = [ids[start : start + size] for start in range(0, len(ids), size)]
        return [{"input_ids": window} for window in windows if len(window) >= self.shortest]

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Generate the missing parts of the texts."""
        prompts = self.encode(data.examples, data.setting, labelled=False)
        return list(generate(model, prompts, batch_size, self))

"""What tasks have in common that restore raw text with an encoder-decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from adapterhub.tasks._base import Encoded, Prediction
from adapterhub.tasks._generation import Generation, generate
from adapterhub.tasks._rows import Row, Setting
from adapterhub.tasks._show import tokens_line
from adapterhub.tasks.masked_lm import RawText

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class RestoredText(Generation, RawText):
    """Text that was changed goes in, and what was lost is the target."""

    def padding_side(self, setting: Setting) -> str:
        """Return the right: the decoder starts at the first position."""
        return "right"

    def show_row(self, row: Row, setting: Setting) -> dict[str, str]:
        """Return the tokens of the input and of the target."""
        return {
            "tokens": tokens_line(row["input_ids"], setting.tokenizer),
            "target": tokens_line(row["labels"], setting.tokenizer),
        }

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Generate what is missing in the texts."""
        prompts = self.encode(data.examples, data.setting, labelled=False)
        return list(generate(model, prompts, batch_size, self))

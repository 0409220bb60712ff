"""Rows of token ids: encoding settings, padding and truncation."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

UNLIMITED = 1 << 30  # tokens
IGNORED = -100  # label of the positions that the loss ignores

P = TypeVar("P")

Row = dict[str, Any]
"""The unpadded model inputs for one example: lists of numbers, and `labels` for training."""


@dataclass(frozen=True)
class Setting:
    """The model and run that examples are encoded for.

    Attributes:
        processor: the tokenizer of the backbone, with the adapter's new tokens; or the processor of
            an image or audio backbone.
        max_length: the longest input, in tokens.
        labels: the classes, in the order of the logits.
        seed: the seed of random inputs, such as masks.
        positions: the positions that the model has for a text and its continuation:
            `text_positions`.
        windows: whether long texts are tagged in windows, so that every word gets a tag; training
            truncates them.
    """

    processor: Any
    max_length: int
    labels: tuple[str, ...] = ()
    seed: int = 0
    positions: int = UNLIMITED
    windows: bool = False

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The processor, or its tokenizer."""
        return getattr(self.processor, "tokenizer", self.processor)  # type: ignore[no-any-return]

    @property
    def unlimited(self) -> Setting:
        """Return the same setting for a tokenizer, without a longest input."""
        tokenizer = copy.copy(self.tokenizer)
        tokenizer.model_max_length = UNLIMITED
        return replace(self, processor=tokenizer, max_length=UNLIMITED, positions=UNLIMITED)


def rows_from_columns(encoded: Mapping[str, Any]) -> list[Row]:
    """Convert the columns that a tokenizer returns into rows."""
    return [dict(zip(encoded, row, strict=True)) for row in zip(*encoded.values(), strict=True)]


def pad(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, side: str | None = None
) -> dict[str, Tensor]:
    """Stack rows into tensors: padded lists (batch, tokens), numbers (batch,).

    The default side is the tokenizer's padding side.
    """
    import torch  # slow to import

    fills = {
        "input_ids": tokenizer.pad_token_id,
        "token_type_ids": tokenizer.pad_token_type_id,
        "labels": IGNORED,
    }
    left = (side or tokenizer.padding_side) == "left"
    batch = {}
    for key, first in (rows[0] if rows else {}).items():
        values = [row[key] for row in rows]
        if isinstance(first, list):
            longest = max(map(len, values))
            gaps = [[fills.get(key, 0)] * (longest - len(value)) for value in values]
            pairs = zip(values, gaps, strict=True)
            values = [gap + value if left else value + gap for value, gap in pairs]
        batch[key] = torch.tensor(values)
    return batch


def limit_of(setting: Setting) -> int:
    """Return the longest input in tokens, from the options and the tokenizer."""
    return min(setting.max_length, setting.tokenizer.model_max_length)


def cut_text(text: str, tokenizer: PreTrainedTokenizerBase, tokens: int) -> str:
    """Truncate a text to a number of tokens."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = encoded["offset_mapping"]
    return text if len(offsets) <= tokens else text[: offsets[tokens - 1][1]]


def without_end(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a text without the tokenizer's end-of-text token."""
    ends = {tokenizer.eos_token_id, tokenizer.sep_token_id} - {tokenizer.bos_token_id, None}
    return ids[:-1] if len(ids) > 1 and ids[-1] in ends else ids


def in_order(by_index: Mapping[int, P]) -> list[P]:
    """List the values of a mapping from 0, 1, ... in the order of the keys."""
    return [by_index[i] for i in range(len(by_index))]

"""Rows of token ids: the setting they are encoded for, padding, batches and forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from adapterhub.status import counting

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from adapterhub.tasks._base import Task

IGNORED = -100  # label of the positions that the loss ignores

P = TypeVar("P")

Row = dict[str, Any]
"""The unpadded model inputs for one example: lists of numbers, and `labels` for training."""


@dataclass(frozen=True)
class Setting:
    """The model and run that examples are encoded for.

    Attributes:
        tokenizer: the tokenizer of the backbone, with the adapter's new tokens.
        max_length: the longest input, in tokens.
        labels: the classes, in the order of the logits.
        seed: the seed of random inputs, such as masks.
        positions: the number of positions of the model.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    labels: tuple[str, ...] = ()
    seed: int = 0
    positions: int = 1 << 30


@dataclass(frozen=True)
class Encoded:
    """Encoded examples: rows of token ids, truncated, and padded when batched.

    One example may have several rows, or one row several (packed) examples. `owners[i]` is the
    index of the example of row i; it is empty if rows are packed.
    """

    task: Task
    setting: Setting
    examples: tuple[Any, ...]
    rows: list[Row]
    owners: tuple[int, ...]

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each row."""
        return [len(row["input_ids"]) for row in self.rows]

    def batch(self, indices: Sequence[int], epoch: int = 0) -> dict[str, Tensor]:
        """Return the model inputs for some rows, padded to the longest: (batch, tokens).

        Random inputs, such as masks, depend only on the seed, the epoch and the row.
        """
        rows = [
            self.task.vary(self.rows[i], self.setting, (self.setting.seed, epoch, i))
            for i in indices
        ]
        return self.task.collate(rows, self.setting)


def one_row_each(task: Task, examples: Sequence[Any], setting: Setting, rows: list[Row]) -> Encoded:
    """Build the encoding of examples that have one row each.

    Args:
        task: the task that encoded them.
        examples: the examples.
        setting: the setting they were encoded for.
        rows: one row per example, in order.
    """
    return Encoded(task, setting, tuple(examples), rows, tuple(range(len(rows))))


def rows_from_columns(encoded: Mapping[str, Any]) -> list[Row]:
    """Convert the columns that a tokenizer returns into rows."""
    return [dict(zip(encoded, row, strict=True)) for row in zip(*encoded.values(), strict=True)]


def pad(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, side: str | None = None
) -> dict[str, Tensor]:
    """Stack rows into tensors: padded lists (batch, tokens), numbers (batch,).

    Args:
        rows: rows with the same keys.
        tokenizer: gives the padding values.
        side: "left" or "right"; by default the padding side of the tokenizer.
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
    """Return the longest input in tokens, by the options and the tokenizer."""
    return min(setting.max_length, setting.tokenizer.model_max_length)


def cut_text(text: str, tokenizer: PreTrainedTokenizerBase, tokens: int) -> str:
    """Truncate a text to a number of tokens.

    Args:
        text: the text.
        tokenizer: a fast tokenizer.
        tokens: the most tokens to keep, 1 or more.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    return text if len(offsets) <= tokens else text[: offsets[tokens - 1][1]]


def in_order(by_index: Mapping[int, P]) -> list[P]:
    """List the values of a mapping from 0, 1, ... in the order of the keys."""
    return [by_index[i] for i in range(len(by_index))]


def forward(
    model: PreTrainedModel, data: Encoded, batch_size: int, *, labels: bool = False
) -> Iterator[tuple[list[int], dict[str, Tensor], Any]]:
    """Run a model on all rows and yield (row indices, batch, output) per batch.

    Args:
        model: the model, put in evaluation mode.
        data: the encoded examples.
        batch_size: rows per forward pass; rows of similar length share a batch.
        labels: whether the model also gets the labels, to compute its loss.
    """
    import torch  # slow to import

    model.eval()
    for indices in by_length(data, batch_size):
        batch = {k: v.to(model.device) for k, v in data.batch(indices).items()}
        inputs = {k: v for k, v in batch.items() if labels or k != "labels"}
        with torch.inference_mode():
            output = model(**inputs)
        yield indices, batch, output


def by_length(data: Encoded, batch_size: int) -> Iterator[list[int]]:
    """Yield the row indices of each batch, short rows first, so that little is padded.

    How many rows are done is shown to the user, if that takes long.
    """
    lengths = data.lengths
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    with counting(len(order), "predicting") as done:
        for start in range(0, len(order), batch_size):
            yield order[start : start + batch_size]
            done(min(batch_size, len(order) - start))

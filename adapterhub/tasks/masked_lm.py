"""Masked language modelling on raw text, for continued pre-training.

    example      a raw text
    row          a window of at most max_length tokens; `labels`: the chosen tokens
    prediction   the most probable tokens for each mask in the text
    metrics      loss and perplexity of the chosen tokens

In each window a share `rate` of the tokens is chosen: 80 % of these become the mask token, 10 % a
random token, 10 % stay, and the model predicts all of them (Devlin et al. 2019, section 3.1 and
appendix A.1, https://arxiv.org/abs/1810.04805). With `whole_words`, either all tokens of a word are
chosen or none (Cui et al. 2021, section 2.1, https://arxiv.org/abs/1906.08101). Each epoch draws
new tokens, as in Liu et al. 2019, section 4.1, https://arxiv.org/abs/1907.11692.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapterhub.config.options import option
from adapterhub.data.examples import Example
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks.common.base import Encoded, Prediction, register_task
from adapterhub.tasks.common.batches import IGNORED, Passed, Row, Setting, each_row, limit_of
from adapterhub.tasks.common.packing import Frame, around_text, word_starts
from adapterhub.tasks.common.self_supervised import RawText

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LISTED_FILLS = 5  # most probable tokens listed per mask in a prediction
_Fills = list[dict[str, float]]


@dataclass(frozen=True)
class Filled(Prediction):
    """A text with its masks filled, and the most probable tokens for each mask."""

    text: str
    fills: tuple[dict[str, float], ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the text, and the probabilities of the best tokens for each mask."""
        return {"filled": self.text, "fills": list(self.fills)}

    def __str__(self) -> str:
        return self.text


@register_task
@dataclass(frozen=True)
class MaskedLM(RawText):
    """Masked tokens of raw text.

    Rows of `train.txt`:

        The glacier moves a few metres every year.
        In spring its edge is covered with flowers.

    Each line is a text. Files with columns are read as well, from the column `text`. Long texts are
    cut into windows, without loss.

    `predict` fills the mask tokens of a text:

        the glacier moves slowly
        {"filled": "the glacier moves slowly", "fills": [{"slowly": 0.31, "fast": 0.07}]}
    """

    rate: float = option(0.15, "share of the tokens to predict")
    whole_words: bool = option(False, "choose all tokens of a word, or none")

    name = "masked-lm"
    summary = "masked tokens of raw text: continued pre-training of encoders"
    main_metric = "loss"
    printed_fields = ("filled", "fills")

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ConfigError(f"rate is {self.rate}", expected="a number between 0 and 1")

    # Rows

    def encode(self, examples: Sequence[Example], setting: Setting, *, labelled: bool) -> Encoded:
        """Cut texts into windows.

        Raises:
            DataError: there are no windows to learn from.
        """
        encoded = super().encode(examples, setting, labelled=labelled)
        if labelled and not encoded.rows:
            raise DataError("the texts contain no tokens")
        return encoded

    def rows_of(self, example: Example, setting: Setting, *, labelled: bool) -> list[Row]:
        """Return the windows of a text; `labelled` adds `special` flags of tokens never chosen."""
        encoded = _checked(setting.tokenizer)(
            example.text, truncation=True, max_length=limit_of(setting),
            return_overflowing_tokens=True, return_special_tokens_mask=True,
        )  # fmt: skip
        rows: list[Row] = []
        for number, ids in enumerate(encoded["input_ids"]):
            special = encoded["special_tokens_mask"][number]
            row: Row = {"input_ids": ids, "attention_mask": [1] * len(ids)}
            if labelled and all(special):
                continue
            if labelled:
                row["special"] = special
            if labelled and self.whole_words:
                row["starts"] = sorted(word_starts(encoded, number, example.text))
            rows.append(row)
        return rows

    def frame(self, setting: Setting) -> Frame:
        """Return the special tokens of a text: windows are between them."""
        before, after = around_text(_checked(setting.tokenizer))
        return Frame(end=after, before=before, after=after, words=self.whole_words)

    def window_row(self, ids: list[int], starts: list[int], frame: Frame) -> Row:
        """Flag the special tokens, which are never chosen."""
        flags = [int(i in frame.before or i in frame.after) for i in ids]
        row = {"input_ids": ids, "attention_mask": [1] * len(ids), "special": flags}
        return row | ({"starts": starts} if self.whole_words else {})

    def vary(self, row: Row, setting: Setting, key: tuple[int, int, int]) -> Row:
        """Mask a row, at least one token, differently in each epoch."""
        if "special" not in row:
            return row
        import numpy as np  # slow to import

        random, tokenizer = np.random.default_rng(key), setting.tokenizer
        free = [i for i, special in enumerate(row["special"]) if not special]
        count = min(max(1, round(self.rate * len(free))), len(free))
        ids, labels = list(row["input_ids"]), [IGNORED] * len(row["input_ids"])
        if self.whole_words:
            chosen = _words(free, row["starts"], count, random)
        else:
            chosen = random.choice(free, count, replace=False).tolist()
        for position in chosen:
            labels[position] = ids[position]
            chance = random.random()
            if chance < 0.8:
                ids[position] = tokenizer.mask_token_id
            elif chance < 0.9:
                ids[position] = int(random.integers(len(tokenizer)))
        return {"input_ids": ids, "attention_mask": row["attention_mask"], "labels": labels}

    # Predictions

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Fill each mask of a text with its most probable token."""
        tokenizer = data.setting.tokenizer
        windows = data.task.encode(data.examples, data.setting, labelled=False)

        def read(passed: Passed) -> Iterator[_Fills]:
            width = passed.batch["input_ids"].shape[1]
            for logits, index in zip(passed.output.logits, passed.indices, strict=True):
                ids = windows.rows[index]["input_ids"]
                offset = width - len(ids) if tokenizer.padding_side == "left" else 0
                masks = [p for p, token in enumerate(ids) if token == tokenizer.mask_token_id]
                yield [_most_probable(logits[offset + p], tokenizer) for p in masks]

        fills: list[_Fills] = [[] for _ in windows.examples]
        candidates = each_row(model, windows, batch_size, read)
        for probable, owner in zip(candidates, windows.owners, strict=True):
            fills[owner] += probable
        mask = str(tokenizer.mask_token)
        return [
            _filled(e.text, fill, mask) for e, fill in zip(windows.examples, fills, strict=True)
        ]


def _words(
    free: list[int], starts: list[int], count: int, random: np.random.Generator
) -> list[int]:
    """Choose random words with at most `count` tokens in total, but at least one word.

    `free` are the positions of tokens that may be chosen, `starts` the positions of word starts.
    """
    first, words = {*starts}, list[list[int]]()
    for position in free:
        if not words or position in first or position != words[-1][-1] + 1:
            words.append([])
        words[-1].append(position)
    chosen: list[int] = []
    for index in random.permutation(len(words)):
        if not chosen or len(chosen) + len(words[index]) <= count:
            chosen += words[index]
    return chosen


def _checked(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer that can mask.

    Raises:
        ConfigError: the tokenizer has no mask token, or is slow.
    """
    if tokenizer.mask_token_id is None or not tokenizer.is_fast:
        raise ConfigError(
            f"the tokenizer of {tokenizer.name_or_path} has no mask token, or is slow",
            expected="the fast tokenizer of a masked language model, such as BERT",
            hint="--task causal-lm, or --task span-corruption",
        )
    return tokenizer


def _most_probable(logits: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    top = logits.float().softmax(-1).topk(LISTED_FILLS)
    probable: dict[str, float] = {}
    for token, value in zip(top.indices.tolist(), top.values.tolist(), strict=True):
        probable.setdefault(
            str(tokenizer.decode([token])).strip(), value
        )  # with or without a space
    return probable


def _filled(text: str, fills: _Fills, mask: str) -> Filled:
    for fill in fills:
        text = text.replace(mask, next(iter(fill)), 1)
    return Filled(text, tuple(fills))

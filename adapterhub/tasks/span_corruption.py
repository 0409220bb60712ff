"""Span corruption on raw text, for continued pre-training of encoder-decoders.

Raffel et al. 2020, section 3.1.4, https://arxiv.org/abs/1910.10683: `rate` of the tokens are
dropped, in spans of `span` tokens on average; in the input a sentinel stands for each span. The
target has each span behind its sentinel, and ends with one sentinel more:

    input    the movie <extra_id_0> very <extra_id_1> indeed </s>
    target   <extra_id_0> was <extra_id_1> good <extra_id_2> </s>

Kept and dropped tokens are both cut into the same number of spans at random, all cuts being equally
likely; the first span is kept. Each epoch cuts anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.config.options import option
from adapterhub.data.examples import Example
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks._base import (
    Encoded,
    Prediction,
    Row,
    Setting,
    limit_of,
    pad,
    random_of,
    register_task,
)
from adapterhub.tasks._generation import Generation, generate
from adapterhub.tasks.masked_lm import RawText


@register_task
@dataclass(frozen=True)
class SpanCorruption(Generation, RawText):
    """Dropped spans of raw text."""

    rate: float = option(0.15, "share of the tokens that are dropped")
    span: float = option(3.0, "tokens of a dropped span, on average")

    name = "span-corruption"
    summary = "dropped spans of raw text: continued pre-training of encoder-decoders"
    main_metric = "loss"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rate < 1 or self.span < 1:
            raise ConfigError(
                f"rate is {self.rate} and span is {self.span}",
                expected="a rate between 0 and 1, a span of 1 or more",
            )

    @property
    def head(self) -> str:
        """An encoder-decoder."""
        return "seq2seq"

    def encode(self, examples: Sequence[Example], setting: Setting, *, labelled: bool) -> Encoded:
        """With `labelled` windows of two tokens or more, to be corrupted; else texts as they
        are, with sentinels in them."""
        tokenizer, limit = setting.tokenizer, limit_of(setting)
        sentinels(tokenizer)
        if not labelled:
            texts = (tokenizer(e.text, truncation=True, max_length=limit) for e in examples)
            asked: list[Row] = [
                {k: text[k] for k in ("input_ids", "attention_mask")} for text in texts
            ]
            return Encoded(self, setting, tuple(examples), asked, tuple(range(len(asked))))
        rows: list[Row] = []
        owners: list[int] = []
        for index, example in enumerate(examples):
            ids = tokenizer(example.text, add_special_tokens=False)["input_ids"]
            for part in (ids[i : i + limit - 1] for i in range(0, len(ids), limit - 1)):
                if len(part) > 1:
                    rows.append({"input_ids": part})
                    owners.append(index)
        if not rows:
            raise DataError("no text has two tokens or more")
        return Encoded(self, setting, tuple(examples), rows, tuple(owners))

    def vary(self, row: Row, setting: Setting, key: tuple[int, int, int]) -> Row:
        """Other spans are dropped in each epoch."""
        marks = sentinels(setting.tokenizer)
        ids = row["input_ids"]
        kept, dropped = span_lengths(len(ids), self.rate, self.span, len(marks) - 1, random_of(key))
        inputs: list[int] = []
        labels: list[int] = []
        at = 0
        for mark, keep, drop in zip(marks, kept, dropped, strict=False):
            inputs += [*ids[at : at + keep], mark]
            labels += [mark, *ids[at + keep : at + keep + drop]]
            at += keep + drop
        labels.append(marks[len(dropped)])
        end = [setting.tokenizer.eos_token_id]
        return {
            "input_ids": inputs + end,
            "attention_mask": [1] * (len(inputs) + 1),
            "labels": labels + end,
        }

    def collate(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """Padded behind: the decoder starts at the first position."""
        return pad(rows, setting.tokenizer, "right")

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """What the model writes for the sentinels in the texts."""
        plain = self.encode(data.examples, data.setting, labelled=False)
        return list(generate(model, plain, batch_size, self))


def span_lengths(
    tokens: int, rate: float, span: float, most: int, random: np.random.Generator
) -> tuple[list[int], list[int]]:
    """The lengths of kept and of dropped spans, in turn, a kept one first; `tokens` is 2 or more.

    Both lists are of one length, `most` at most, and each span has a token or more.
    """
    drop = min(max(round(tokens * rate), 1), tokens - 1)
    count = min(max(round(drop / span), 1), drop, tokens - drop, most)
    return _cut(tokens - drop, count, random), _cut(drop, count, random)


def _cut(tokens: int, parts: int, random: np.random.Generator) -> list[int]:
    """So many lengths, each from 1, whose sum is `tokens`; all such lists are equally likely."""
    cuts = np.sort(random.choice(tokens - 1, parts - 1, replace=False)) + 1
    return [int(length) for length in np.diff([0, *cuts, tokens])]


def sentinels(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of <extra_id_0>, <extra_id_1> and so on.

    Raises:
        ConfigError: the tokenizer has less than two of them, or no token that ends a text.
    """
    vocabulary = tokenizer.get_vocab()
    names = (f"<extra_id_{i}>" for i in range(len(vocabulary)))
    found = []
    for name in names:
        if name not in vocabulary:
            break
        found.append(vocabulary[name])
    if len(found) < 2 or tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer of {tokenizer.name_or_path} has no sentinels <extra_id_0>, ...",
            expected="a T5",
            hint="--task seq2seq, or --task masked-lm",
        )
    return found

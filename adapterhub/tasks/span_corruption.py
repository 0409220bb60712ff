"""Span corruption on raw text, for continued pre-training of encoder-decoders.

    example      a raw text
    row          a window with its dropped spans as sentinels; `labels`: the dropped spans
    prediction   generated texts for the sentinels in a text
    metrics      loss and perplexity of the dropped spans

Raffel et al. 2020, section 3.1.4, https://arxiv.org/abs/1910.10683: a share `rate` of the tokens is
dropped, in spans of `span` tokens on average. A sentinel replaces each span in the input; the
target has each span after its sentinel, and one more sentinel at the end:

    input    the movie <extra_id_0> very <extra_id_1> indeed </s>
    target   <extra_id_0> was <extra_id_1> good <extra_id_2> </s>

The kept and the dropped tokens are split into equally many spans, uniformly at random over all
splits; the first span is kept. Each epoch draws a new split.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adapterhub.config.options import option
from adapterhub.errors import ConfigError
from adapterhub.tasks.common.base import register_task
from adapterhub.tasks.common.batches import Row, Setting, limit_of
from adapterhub.tasks.common.packing import Frame
from adapterhub.tasks.common.self_supervised import RestoredText

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase


@register_task
@dataclass(frozen=True)
class SpanCorruption(RestoredText):
    """Dropped spans of raw text.

    Rows of `train.txt`:

        The glacier moves a few metres every year.
        In spring its edge is covered with flowers.

    Each line is a text. Files with columns are read as well, from the column `text`. Long texts are
    cut into windows, without loss.

    `predict` generates texts for the sentinels of a text:

        moves slowly
        {"generated": "moves slowly"}
    """

    rate: float = option(0.15, "share of the tokens to drop")
    span: float = option(3.0, "mean length of a dropped span, in tokens")

    name = "span-corruption"
    summary = "dropped spans of raw text: continued pre-training of encoder-decoders"
    main_metric = "loss"
    shortest = 2
    no_windows = "no text has two or more tokens"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rate < 1 or self.span < 1:
            raise ConfigError(
                f"rate is {self.rate} and span is {self.span}",
                expected="a rate between 0 and 1, a span of 1 or more",
            )

    # Rows

    def frame(self, setting: Setting) -> Frame:
        """Return the end token of documents, and room for the end of the text."""
        sentinels(setting.tokenizer)
        return Frame(end=(int(setting.tokenizer.eos_token_id),), room=1)

    def fits(self, row: Row, setting: Setting) -> bool:
        """Return whether the text is one window, with its end-of-text token."""
        return self.row_lengths(row)[0] <= limit_of(setting)

    def row_lengths(self, row: Row) -> list[int]:
        """Count the tokens of a window, and the end-of-text token that `vary` adds."""
        return [len(row["input_ids"]) + 1]

    def vary(self, row: Row, setting: Setting, key: tuple[int, int, int]) -> Row:
        """Drop spans of a row, different ones in each epoch."""
        import numpy as np  # slow to import

        marks = sentinels(setting.tokenizer)
        ids = row["input_ids"]
        random = np.random.default_rng(key)
        kept, dropped = span_lengths(len(ids), self.rate, self.span, len(marks) - 1, random)
        inputs: list[int] = []
        labels: list[int] = []
        start = 0
        for mark, keep, drop in zip(marks, kept, dropped, strict=False):
            inputs += [*ids[start : start + keep], mark]
            labels += [mark, *ids[start + keep : start + keep + drop]]
            start += keep + drop
        labels.append(marks[len(dropped)])
        end = [setting.tokenizer.eos_token_id]
        return {
            "input_ids": inputs + end,
            "attention_mask": [1] * (len(inputs) + 1),
            "labels": labels + end,
        }


def span_lengths(
    tokens: int, rate: float, span: float, most: int, random: np.random.Generator
) -> tuple[list[int], list[int]]:
    """Draw the lengths of kept and dropped spans, which alternate; the first is kept.

    A share `rate` of the tokens (2 or more) is dropped, in at most `most` spans with a mean length
    of `span`.

    Returns:
        Two lists of the same length; every span has one or more tokens.
    """
    drop = min(max(round(tokens * rate), 1), tokens - 1)
    count = min(max(round(drop / span), 1), drop, tokens - drop, most)
    return _split(tokens - drop, count, random), _split(drop, count, random)


def _split(tokens: int, parts: int, random: np.random.Generator) -> list[int]:
    """Draw `parts` lengths of 1 or more that sum to `tokens`, uniformly over all such lists."""
    import numpy as np  # slow to import

    cuts = np.sort(random.choice(tokens - 1, parts - 1, replace=False)) + 1
    return [int(length) for length in np.diff([0, *cuts, tokens])]


def sentinels(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of <extra_id_0>, <extra_id_1> and so on.

    Raises:
        ConfigError: the tokenizer has fewer than two sentinels, or no end-of-text token.
    """
    vocabulary = tokenizer.get_vocab()
    names = (f"<extra_id_{i}>" for i in range(len(vocabulary)))
    ids = [vocabulary[name] for name in itertools.takewhile(vocabulary.__contains__, names)]
    if len(ids) < 2 or tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer of {tokenizer.name_or_path} has no sentinels <extra_id_0>, ...",
            expected="the tokenizer of a T5",
            hint="--task seq2seq, or --task masked-lm",
        )
    return ids

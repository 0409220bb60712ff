"""Denoising of raw text, for continued pre-training of encoder-decoders such as BART.

    example      a raw text
    row          a window with noise; `labels`: the window without it
    prediction   a generated text for a noised one
    metrics      loss and perplexity of the original text

The five noises of Lewis et al. 2020, section 2.2, https://arxiv.org/abs/1910.13461, in the order of
application, each to the result of the previous one:

    permute    the sentences, which end at full stops, are shuffled
    infill     spans with lengths from Poisson(`span`) become one mask each; length 0 inserts one
    mask       tokens become masks
    delete     tokens are removed
    rotate     the text begins at another token, and its beginning follows its end

The defaults are the choices of Lewis et al. for BART: infilling of 30 % of the tokens, and
permutation of all sentences (section 3). Each epoch draws new noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adapterhub.config.options import option
from adapterhub.errors import ConfigError
from adapterhub.tasks.common.base import register_task
from adapterhub.tasks.common.batches import Row, Setting, limit_of
from adapterhub.tasks.common.packing import Frame, around_text
from adapterhub.tasks.common.self_supervised import RestoredText

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

_FULL_STOPS = (".", "!", "?", "。", "！", "？")  # noqa: RUF001


@register_task
@dataclass(frozen=True)
class Denoising(RestoredText):
    """Noised raw text, to be restored.

    Rows of `train.txt`:

        The glacier moves a few metres every year. In spring its edge is covered with flowers.
        Below it lies a lake.

    Each line is a text. Files with columns are read as well, from the column `text`. Long texts are
    cut into windows, without loss.

    `predict` restores a text with masks:

        the glacier moves slowly
        {"generated": "the glacier moves slowly"}
    """

    permute: float = option(1.0, "share of the rows whose sentences are shuffled")
    infill: float = option(0.3, "share of the tokens in spans that become one mask each")
    span: float = option(3.0, "mean length of an infilled span, in tokens")
    mask: float = option(0.0, "share of the tokens that become masks")
    delete: float = option(0.0, "share of the tokens that are removed")
    rotate: float = option(0.0, "share of the rows that begin at another token")

    name = "denoising"
    summary = "noised raw text, as BART: continued pre-training of encoder-decoders"
    main_metric = "loss"

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = (self.infill, self.mask, self.delete)
        chances = (self.permute, self.rotate)
        if not (
            all(0 <= share < 1 for share in shares)
            and all(0 <= chance <= 1 for chance in chances)
            and 0 < self.span <= 100
            and any((*shares, *chances))
        ):
            raise ConfigError(
                f"permute={self.permute}, infill={self.infill}, span={self.span}, "
                f"mask={self.mask}, delete={self.delete}, rotate={self.rotate}",
                expected="shares from 0 to 1, one of them above 0, and a span of 0 to 100 tokens",
            )

    # Rows

    def frame(self, setting: Setting) -> Frame:
        """Return the tokens around documents, and the room for the tokens that `vary` adds.

        Raises:
            ConfigError: the tokenizer lacks a mask token or an end-of-text token.
        """
        tokenizer = setting.tokenizer
        if tokenizer.mask_token_id is None or tokenizer.eos_token_id is None:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path} has no mask or end-of-text token",
                expected="the tokenizer of BART or mBART",
                hint="--task span-corruption for a T5, --task masked-lm for an encoder",
            )
        before, after = around_text(tokenizer)
        return Frame(end=(int(tokenizer.eos_token_id),), room=len(before) + len(after))

    def fits(self, row: Row, setting: Setting) -> bool:
        """Return whether the text is one window, with its special tokens."""
        return len(row["input_ids"]) <= self.frame(setting).size(limit_of(setting))

    def vary(self, row: Row, setting: Setting, key: tuple[int, int, int]) -> Row:
        """Noise a row, differently in each epoch."""
        import numpy as np  # slow to import

        tokenizer, ids = setting.tokenizer, row["input_ids"]
        before, after = around_text(tokenizer)
        noised = self.noise(ids, tokenizer, np.random.default_rng(key))
        inputs = [*before, *noised, *after]
        return {
            "input_ids": inputs,
            "attention_mask": [1] * len(inputs),
            "labels": [*before, *ids, *after],
        }

    def noise(
        self, ids: list[int], tokenizer: PreTrainedTokenizerBase, random: np.random.Generator
    ) -> list[int]:
        """Return token ids with the noises of the options.

        The ids do not include special tokens.
        """
        mask = int(tokenizer.mask_token_id)
        if random.random() < self.permute:
            ids = permuted(ids, _ends(ids, tokenizer), random)
        if self.infill:
            ids = infilled(ids, mask, self.infill, self.span, random)
        if self.mask:
            chosen = _positions(ids, self.mask, random)
            ids = [mask if n in chosen else i for n, i in enumerate(ids)]
        if self.delete:
            chosen = _positions(ids, self.delete, random)
            ids = [i for n, i in enumerate(ids) if n not in chosen]
        return rotated(ids, random) if random.random() < self.rotate else ids


def permuted(ids: list[int], ends: Sequence[bool], random: np.random.Generator) -> list[int]:
    """Return the sentences of a text in a random order."""
    sentences: list[list[int]] = [[]]
    for token, last in zip(ids, ends, strict=True):
        sentences[-1].append(token)
        if last:
            sentences.append([])
    return [token for n in random.permutation(len(sentences)) for token in sentences[n]]


def infilled(
    ids: list[int], mask: int, rate: float, span: float, random: np.random.Generator
) -> list[int]:
    """Replace spans of tokens by one mask each; a span of length 0 inserts a mask.

    `rate` is the share of the tokens in spans, `span` their mean length; the last one is cut to
    reach the share exactly.
    """
    lengths = span_draws(round(len(ids) * rate), span, random)
    items = len(ids) - sum(lengths) + len(lengths)  # kept tokens and spans, in any order
    places = set(random.choice(items, len(lengths), replace=False).tolist())
    noised: list[int] = []
    position, waiting = 0, iter(lengths)
    for item in range(items):
        if item in places:
            noised.append(mask)
            position += next(waiting)
        else:
            noised.append(ids[position])
            position += 1
    return noised


def span_draws(tokens: int, span: float, random: np.random.Generator) -> list[int]:
    """Draw lengths from Poisson(`span`) until they sum to `tokens`."""
    lengths: list[int] = []
    left = tokens
    while left > 0:
        lengths.append(min(int(random.poisson(span)), left))
        left -= lengths[-1]
    return lengths


def rotated(ids: list[int], random: np.random.Generator) -> list[int]:
    """Rotate a text to begin at a token drawn uniformly."""
    start = int(random.integers(len(ids))) if ids else 0
    return ids[start:] + ids[:start]


def _positions(ids: list[int], rate: float, random: np.random.Generator) -> set[int]:
    """Draw a share `rate` of the positions."""
    return set(random.choice(len(ids), round(len(ids) * rate), replace=False).tolist())


def _ends(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[bool]:
    """Return which tokens end a sentence: full stops, and the end of a document."""
    tokens = tokenizer.convert_ids_to_tokens(ids)
    last = tokenizer.eos_token_id
    return [t.endswith(_FULL_STOPS) or i == last for t, i in zip(tokens, ids, strict=True)]

"""Masked language modelling on raw text, for continued pre-training.

Of each text `rate` of the tokens are chosen: 80 % of them become the mask token, 10 % another token
at random, 10 % stay, and the model predicts all of these (Devlin et al. 2019, section 3.1 and
appendix A.1, https://arxiv.org/abs/1810.04805). Each epoch chooses anew, as in Liu et al. 2019,
section 4.1, https://arxiv.org/abs/1907.11692.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.config.options import option
from adapterhub.data.examples import Example, read_texts
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks._base import (
    IGNORED,
    Encoded,
    Prediction,
    Row,
    Setting,
    Task,
    forward,
    limit_of,
    random_of,
    register_task,
)
from adapterhub.tasks._generation import token_loss

_SHOWN = 5  # tokens that a prediction lists for a mask


@dataclass(frozen=True)
class Filled(Prediction):
    """A text with its masks filled, and for each mask the most probable tokens."""

    text: str
    fills: tuple[dict[str, float], ...]

    def as_dict(self) -> dict[str, Any]:
        """The text, and the probability of the best tokens for each mask."""
        return {"filled": self.text, "fills": list(self.fills)}

    def __str__(self) -> str:
        return self.text


class RawText(Task):
    """What masked-lm and span-corruption share: texts without labels, none of it cut."""

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Example]:
        """The texts of one column, or the lines of a text file."""
        return read_texts(source, options, split)

    def metrics(
        self, examples: Sequence[Any], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """None: see `evaluate`."""
        return {}

    def evaluate(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> dict[str, float]:
        """loss and perplexity of what is hidden; each evaluation hides the same."""
        return token_loss(model, data, batch_size)


@register_task
@dataclass(frozen=True)
class MaskedLM(RawText):
    """Hidden tokens of raw text."""

    rate: float = option(0.15, "share of the tokens that the model predicts")

    name = "masked-lm"
    summary = "hidden tokens of raw text: continued pre-training of encoders"
    main_metric = "loss"

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ConfigError(f"rate is {self.rate}", expected="a number between 0 and 1")

    def encode(self, examples: Sequence[Example], setting: Setting, *, labelled: bool) -> Encoded:
        """Texts as windows of the longest length; with `labelled`, `special` marks the tokens that
        are never hidden."""
        tokenizer = setting.tokenizer
        if tokenizer.mask_token_id is None or not tokenizer.is_fast:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path} has no mask token, or is slow",
                expected="a masked language model, such as BERT",
                hint="--task causal-lm, or --task span-corruption",
            )
        rows: list[Row] = []
        owners: list[int] = []
        for index, example in enumerate(examples):
            encoded = tokenizer(
                example.text, truncation=True, max_length=limit_of(setting),
                return_overflowing_tokens=True, return_special_tokens_mask=True,
            )  # fmt: skip
            for ids, special in zip(
                encoded["input_ids"], encoded["special_tokens_mask"], strict=True
            ):
                row: Row = {"input_ids": ids, "attention_mask": [1] * len(ids)}
                if labelled and all(special):
                    continue
                rows.append(row | ({"special": special} if labelled else {}))
                owners.append(index)
        if labelled and not rows:
            raise DataError("the texts have no tokens")
        return Encoded(self, setting, tuple(examples), rows, tuple(owners))

    def vary(self, row: Row, setting: Setting, key: tuple[int, int, int]) -> Row:
        """Other tokens are hidden in each epoch; at least one."""
        if "special" not in row:
            return row
        random, tokenizer = random_of(key), setting.tokenizer
        free = [i for i, special in enumerate(row["special"]) if not special]
        count = max(1, round(self.rate * len(free)))
        ids, labels = list(row["input_ids"]), [IGNORED] * len(row["input_ids"])
        for position in random.choice(free, count, replace=False):
            labels[position] = ids[position]
            chance = random.random()
            if chance < 0.8:
                ids[position] = tokenizer.mask_token_id
            elif chance < 0.9:
                ids[position] = int(random.integers(len(tokenizer)))
        return {"input_ids": ids, "attention_mask": row["attention_mask"], "labels": labels}

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """The most probable token for each mask in the texts."""
        tokenizer, side = data.setting.tokenizer, data.setting.tokenizer.padding_side
        plain = data.task.encode(data.examples, data.setting, labelled=False)
        fills: dict[int, list[dict[str, float]]] = {}
        for indices, batch, output in forward(model, plain, batch_size):
            width = batch["input_ids"].shape[1]
            for at, i in enumerate(indices):
                ids = plain.rows[i]["input_ids"]
                skipped = width - len(ids) if side == "left" else 0
                masks = [p for p, t in enumerate(ids) if t == tokenizer.mask_token_id]
                fills[i] = [_best(output.logits[at, skipped + p], tokenizer) for p in masks]
        return [
            _filled(
                example.text,
                [f for i, o in enumerate(plain.owners) if o == n for f in fills[i]],
                str(tokenizer.mask_token),
            )
            for n, example in enumerate(plain.examples)
        ]


def _best(logits: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    top = logits.float().softmax(-1).topk(_SHOWN)
    tokens = (str(tokenizer.decode([i])).strip() for i in top.indices.tolist())
    return dict(zip(tokens, top.values.tolist(), strict=True))


def _filled(text: str, fills: list[dict[str, float]], mask: str) -> Filled:
    for fill in fills:
        text = text.replace(mask, next(iter(fill)), 1)
    return Filled(text, tuple(fills))

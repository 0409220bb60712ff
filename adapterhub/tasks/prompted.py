"""Classification by a prompt: the language model itself says which label word fits.

Schick & Schütze 2021, section 3.1, https://arxiv.org/abs/2001.07676: a template turns the text into
a cloze, a verbalizer gives each class a word, and q(class) is the softmax of the words' logits at
the mask, over the classes. A causal model is asked for the next token instead (Brown et al. 2020,
https://arxiv.org/abs/2005.14165). There is no new head, so a backbone can be evaluated as it is
(zero-shot), or with worked examples in front of each prompt (few-shot, Brown et al., section 2).
Training uses the model's own loss at that position, over the whole vocabulary.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.config.options import option
from adapterhub.data.examples import Example, check_labels
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks._base import (
    IGNORED,
    Encoded,
    Prediction,
    Row,
    Setting,
    cut_text,
    forward,
    limit_of,
    one_row_each,
    pad,
    register_task,
)
from adapterhub.tasks._metrics import classification_metrics
from adapterhub.tasks.classification import OfTexts, Scored

_FIELDS = re.compile(r"\{(text|pair|mask)\}")


@register_task
@dataclass(frozen=True)
class Prompted(OfTexts):
    """One class for a text or a pair, by a word that the language model finds fitting."""

    template: str = option("{text} It was {mask}.", "the prompt, with {text}, {pair} and {mask}")
    words: dict[str, str] = field(
        default_factory=lambda: {"0": "terrible", "1": "great"},
        metadata={"help": "the word that stands for each label: {label: word}"},
    )
    model: Literal["masked-lm", "causal-lm"] = option(
        "masked-lm", "the kind of model; a causal-lm's template ends with {mask}"
    )
    examples: tuple[tuple[str, ...], ...] = option(
        (), "worked examples in front of each prompt: [[text, label]], or [[text, pair, label]]"
    )

    name = "prompted"
    summary = "classification by a prompt and label words, also without training"
    main_metric = "accuracy"

    def __post_init__(self) -> None:
        found = [match.group(1) for match in _FIELDS.finditer(self.template)]
        if found.count("mask") != 1 or "text" not in found:
            raise ConfigError(
                f"the template {self.template!r} cannot be used", expected="{text}, and {mask} once"
            )
        if self.head == "causal-lm" and not self.template.endswith("{mask}"):
            raise ConfigError(
                f"the template {self.template!r} goes on after the mask",
                expected="a template that ends with {mask}: a causal-lm writes what comes next",
            )
        if len(self.words) < 2:
            raise ConfigError("words has less than two labels", expected="{label: word, ...}")
        fields = 2 + ("pair" in found)
        if wrong := [e for e in self.examples if len(e) != fields or e[-1] not in self.words]:
            raise ConfigError(
                "worked examples that do not fit the template and the words",
                offenders=[repr(list(example)) for example in wrong],
                expected=f"{fields} texts, of which the last is a label with a word",
            )

    @property
    def head(self) -> str:
        """The language model of the option `model`."""
        return self.model

    def check(self, labels: Sequence[str], examples: Sequence[Example]) -> None:
        """The labels that have words, and no others."""
        check_labels(tuple(self.words), (e.label for e in examples))

    def with_shots(self, examples: Sequence[Example], shots: int, seed: int) -> Prompted:
        """The labels take turns, each with `shots` examples that the seed draws.

        Raises:
            DataError: a label has too few.
        """
        self.check((), examples)
        pools = {w: [e for e in examples if str(e.label) == w] for w in self.words}
        if short := [f"{w}: {len(pool)}" for w, pool in pools.items() if len(pool) < shots]:
            raise DataError("too few examples of a label", offenders=short, expected=f"{shots}")
        draw = random.Random(seed)
        turns = zip(*(draw.sample(pool, shots) for pool in pools.values()), strict=True)
        return replace(self, examples=tuple(_worked(e) for turn in turns for e in turn))

    def encode(self, examples: Sequence[Example], setting: Setting, *, labelled: bool) -> Encoded:
        """The filled template; `position` is where the label word is read off."""
        words = dict(zip(self.words, self._word_ids(setting.tokenizer), strict=True))
        rows: list[Row] = []
        for example in examples:
            ids, position = self._prompt(example, setting)
            row: Row = {"input_ids": ids, "position": position}
            if labelled:
                row["labels"] = [IGNORED] * len(ids)
                word = words[str(example.label)]
                if self.head == "causal-lm":
                    row["input_ids"], row["labels"] = [*ids, word], [*row["labels"], word]
                else:
                    row["labels"][position] = word
            row["attention_mask"] = [1] * len(row["input_ids"])
            rows.append(row)
        return one_row_each(self, examples, setting, rows)

    def _prompt(self, example: Example, setting: Setting) -> tuple[list[int], int]:
        """The ids of a prompt, and the position whose logits are the label word's."""
        tokenizer = setting.tokenizer
        causal = self.head == "causal-lm"
        mask = "" if causal else str(tokenizer.mask_token)
        texts = [t for t in (example.text, example.pair) if t is not None]
        front = "".join(f"{self._filled(self.words[e[-1]], *e[:-1])}\n" for e in self.examples)
        frame = self._filled(mask, *[""] * len(texts))
        room = self._room(front, frame, setting)
        cut = [cut_text(t, tokenizer, max(room // len(texts), 1)) for t in texts]
        filled = front + self._filled(mask, *cut)
        ids: list[int] = tokenizer(filled.rstrip() if causal else filled)["input_ids"]
        if causal:
            ends = {tokenizer.eos_token_id, tokenizer.sep_token_id} - {None}
            ids = ids[:-1] if ids[-1] in ends and len(ids) > 1 else ids
            return ids, len(ids) - 1
        return ids, ids.index(tokenizer.mask_token_id)

    def _room(self, front: str, frame: str, setting: Setting) -> int:
        """The tokens that are left for the texts. Worked examples do not count as the input's."""
        worked = len(setting.tokenizer(front, add_special_tokens=False)["input_ids"])
        most = min(setting.positions, setting.tokenizer.model_max_length)
        # One token less: the label word of a causal model.
        taken = len(setting.tokenizer(front + frame)["input_ids"]) + 1
        if worked and taken >= most:
            raise ConfigError(
                f"the worked examples have {worked} tokens, and leave no room for a text",
                expected=f"fewer or shorter ones: the model reads {most} tokens",
            )
        return min(limit_of(setting) + worked, most) - taken

    def _filled(self, mask: str, text: str, pair: str = "") -> str:
        values = {"text": text, "pair": pair, "mask": mask}
        return _FIELDS.sub(lambda match: values[match.group(1)], self.template)

    def _word_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The token of each label word, as it stands after a blank."""
        if self.head == "masked-lm" and tokenizer.mask_token_id is None:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path} has no mask token",
                hint="the option model: prompted(model=causal-lm, ...)",
            )
        found = {
            w: tokenizer(f" {w}", add_special_tokens=False)["input_ids"]
            for w in self.words.values()
        }
        wrong = [
            f"{word!r}: {' '.join(tokenizer.convert_ids_to_tokens(ids)) or 'nothing'}"
            for word, ids in found.items()
            if len(ids) != 1 or ids[0] == tokenizer.unk_token_id
        ]
        if wrong or len({tuple(ids) for ids in found.values()}) < len(self.words):
            raise ConfigError(
                "label words that cannot be told apart by one token each",
                offenders=wrong,
                expected="a different word of one token for each label",
            )
        return [ids[0] for ids in found.values()]

    def collate(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """Padded behind, so that positions stay; without `position`, which no model takes."""
        known = [{k: v for k, v in row.items() if k != "position"} for row in rows]
        return pad(known, setting.tokenizer, "right")

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """The class whose word is the most probable of the label words."""
        asked = self.encode(data.examples, data.setting, labelled=False)
        words = self._word_ids(data.setting.tokenizer)
        found: dict[int, Prediction] = {}
        for indices, _, output in forward(model, asked, batch_size):
            for at, i in enumerate(indices):
                logits = output.logits[at, asked.rows[i]["position"]][words]
                values = logits.float().softmax(-1).tolist()
                scores = dict(zip(self.words, values, strict=True))
                found[i] = Scored(max(scores, key=scores.__getitem__), scores)
        return [found[i] for i in range(len(found))]

    def metrics(
        self, examples: Sequence[Any], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """accuracy, macro_f1, matthews."""
        found = [p.label for p in predictions if isinstance(p, Scored)]
        return classification_metrics([str(e.label) for e in examples], found)


def _worked(example: Example) -> tuple[str, ...]:
    texts = (example.text, example.pair) if example.pair is not None else (example.text,)
    return (*texts, str(example.label))

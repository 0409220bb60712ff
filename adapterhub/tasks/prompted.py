"""Classification by a prompt: a language model scores one word per class.

    example      a text or a pair, with a class name
    row          the filled template; `labels`: the word of the class, at the mask
    prediction   the class whose word is most probable, and all probabilities
    metrics      accuracy, macro F1, Matthews

Schick & Schütze 2021, section 3.1, https://arxiv.org/abs/2001.07676: a template turns the text into
a cloze, a verbalizer maps each class to a word, and q(class) is the softmax of the words' logits at
the mask. A causal model predicts the next token instead (Brown et al. 2020,
https://arxiv.org/abs/2005.14165). There is no new head, so a backbone can be evaluated untrained
(zero-shot), or with labelled examples in front of each prompt (few-shot, Brown et al., section 2).
Training uses the model's own loss at that position, over the whole vocabulary.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from adapterhub.config.options import option
from adapterhub.data.examples import Example, check_labels
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks._base import Encoded, Prediction, one_row_each
from adapterhub.tasks._forward import Passed, each_row
from adapterhub.tasks._registry import register_task
from adapterhub.tasks._rows import IGNORED, Row, Setting, cut_text, limit_of, without_end
from adapterhub.tasks.classification import OfTexts, OneClass, best_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FIELDS = re.compile(r"\{(text|pair|mask)\}")


@register_task
@dataclass(frozen=True)
class Prompted(OneClass, OfTexts):
    """One class per text or pair, by the word that a language model prefers.

    Rows of `train.csv`:

        text,label
        a joy to watch,1
        "dull, and far too long",0

    `words` has the word of each label, one token each; the template says where it is predicted.
    `model: causal-lm` takes a causal language model.

    `predict` prints the class and its probability:

        1 0.981
        {"label": "1", "scores": {"0": 0.019, "1": 0.981}}
    """

    template: str = option("{text} It was {mask}.", "the prompt, with {text}, {pair} and {mask}")
    words: dict[str, str] = field(
        default_factory=lambda: {"0": "terrible", "1": "great"},
        metadata={"help": "the word of each label: {label: word}"},
    )
    model: Literal["masked-lm", "causal-lm"] = option(
        "masked-lm", "kind of model; with causal-lm the template ends with {mask}"
    )
    examples: tuple[tuple[str, ...], ...] = option(
        (), "few-shot examples in front of each prompt: [[text, label]] or [[text, pair, label]]"
    )

    name = "prompted"
    summary = "classification by a prompt and label words, also zero-shot and few-shot"

    def __post_init__(self) -> None:
        fields = [match.group(1) for match in _FIELDS.finditer(self.template)]
        if fields.count("mask") != 1 or "text" not in fields:
            raise ConfigError(
                f"invalid template {self.template!r}", expected="{text}, and {mask} once"
            )
        if self.head == "causal-lm" and not self.template.endswith("{mask}"):
            raise ConfigError(
                f"the template {self.template!r} continues after the mask",
                expected="a template that ends with {mask}: a causal-lm predicts the next token",
            )
        if len(self.words) < 2:
            raise ConfigError("words has fewer than two labels", expected="{label: word, ...}")
        length = 2 + ("pair" in fields)
        if wrong := [e for e in self.examples if len(e) != length or e[-1] not in self.words]:
            raise ConfigError(
                "few-shot examples that do not fit the template and the words",
                offenders=[repr(list(example)) for example in wrong],
                expected=f"{length} texts, the last one a label that has a word",
            )

    @property
    def head(self) -> str:
        """The option `model`."""
        return self.model

    # Examples

    def check(self, labels: Sequence[str], examples: Sequence[Example]) -> None:
        """Refuse labels that have no word."""
        check_labels(tuple(self.words), (e.label for e in examples))

    def with_shots(self, examples: Sequence[Example], shots: int, seed: int) -> Prompted:
        """Draw `shots` examples per label and put them in front of each prompt, labels in turn.

        Raises:
            DataError: a label has too few examples.
        """
        self.check((), examples)
        pools = {label: [e for e in examples if str(e.label) == label] for label in self.words}
        if short := [f"{label}: {len(pool)}" for label, pool in pools.items() if len(pool) < shots]:
            raise DataError("too few examples of a label", offenders=short, expected=f"{shots}")
        draw = random.Random(seed)
        turns = zip(*(draw.sample(pool, shots) for pool in pools.values()), strict=True)
        return replace(self, examples=tuple(_as_option(e) for turn in turns for e in turn))

    # Rows

    def encode(self, examples: Sequence[Example], setting: Setting, *, labelled: bool) -> Encoded:
        """Fill the template; `position` is where the label word is predicted."""
        word_ids = dict(zip(self.words, self._word_ids(setting.tokenizer), strict=True))
        rows: list[Row] = []
        for example in examples:
            ids, position = self._prompt(example, setting)
            row: Row = {"input_ids": ids, "position": position}
            if labelled:
                row["labels"] = [IGNORED] * len(ids)
                word = word_ids[str(example.label)]
                if self.head == "causal-lm":
                    row["input_ids"], row["labels"] = [*ids, word], [*row["labels"], word]
                else:
                    row["labels"][position] = word
            row["attention_mask"] = [1] * len(row["input_ids"])
            rows.append(row)
        return one_row_each(self, examples, setting, rows)

    def fits(self, row: Row, setting: Setting) -> bool:
        """Return False: the room for the texts depends on the filled template."""
        return False

    def _prompt(self, example: Example, setting: Setting) -> tuple[list[int], int]:
        """Return the ids of a prompt, and the position whose logits predict the label word."""
        tokenizer = setting.tokenizer
        causal = self.head == "causal-lm"
        mask = "" if causal else str(tokenizer.mask_token)
        texts = [t for t in (example.text, example.pair) if t is not None]
        shots = "".join(f"{self._filled(self.words[e[-1]], *e[:-1])}\n" for e in self.examples)
        frame = self._filled(mask, *[""] * len(texts))
        room = self._room(shots, frame, setting)
        cut = [cut_text(t, tokenizer, max(room // len(texts), 1)) for t in texts]
        filled = shots + self._filled(mask, *cut)
        ids: list[int] = tokenizer(filled.rstrip() if causal else filled)["input_ids"]
        if causal:
            ids = without_end(ids, tokenizer)
            return ids, len(ids) - 1
        return ids, ids.index(tokenizer.mask_token_id)

    def _room(self, shots: str, frame: str, setting: Setting) -> int:
        """Count the tokens left for the texts; few-shot examples do not count as input length."""
        shot_tokens = len(setting.tokenizer(shots, add_special_tokens=False)["input_ids"])
        most = min(setting.positions, setting.tokenizer.model_max_length)
        word = self.head == "causal-lm"  # its label word comes behind the prompt
        taken = len(setting.tokenizer(shots + frame)["input_ids"]) + word
        if shot_tokens and taken >= most:
            raise ConfigError(
                f"the few-shot examples have {shot_tokens} tokens and leave no room for a text",
                expected=f"fewer or shorter ones: the model reads {most} tokens",
            )
        return min(limit_of(setting) + shot_tokens, most) - taken

    def _filled(self, mask: str, text: str, pair: str = "") -> str:
        values = {"text": text, "pair": pair, "mask": mask}
        return _FIELDS.sub(lambda match: values[match.group(1)], self.template)

    def _word_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the token id of each label word, preceded by a space."""
        if self.head == "masked-lm" and tokenizer.mask_token_id is None:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path} has no mask token",
                hint="the option model: prompted(model=causal-lm, ...)",
            )
        tokens_of = {
            word: tokenizer(f" {word}", add_special_tokens=False)["input_ids"]
            for word in self.words.values()
        }
        wrong = [
            f"{word!r}: {' '.join(tokenizer.convert_ids_to_tokens(ids)) or 'no token'}"
            for word, ids in tokens_of.items()
            if len(ids) != 1 or ids[0] == tokenizer.unk_token_id
        ]
        if wrong or len({tuple(ids) for ids in tokens_of.values()}) < len(self.words):
            raise ConfigError(
                "label words that are not distinct single tokens",
                offenders=wrong,
                expected="a different word of one token for each label",
            )
        return [ids[0] for ids in tokens_of.values()]

    def padding_side(self, setting: Setting) -> str:
        """Return the right, where padding keeps the positions of the words."""
        return "right"

    def collate(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """Pad rows without `position`, which is no input of the model."""
        inputs = [{k: v for k, v in row.items() if k != "position"} for row in rows]
        return super().collate(inputs, setting)

    # Predictions

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Return the class whose word is most probable, with the softmax over the words."""
        prompts = self.encode(data.examples, data.setting, labelled=False)
        word_ids = self._word_ids(data.setting.tokenizer)

        def read(passed: Passed) -> Iterator[Prediction]:
            for logits, index in zip(passed.output.logits, passed.indices, strict=True):
                of_words = logits[prompts.rows[index]["position"]][word_ids]
                probabilities = of_words.float().softmax(-1).tolist()
                yield best_of(dict(zip(self.words, probabilities, strict=True)))

        return each_row(model, prompts, batch_size, read)


def _as_option(example: Example) -> tuple[str, ...]:
    texts = (example.text, example.pair) if example.pair is not None else (example.text,)
    return (*texts, str(example.label))

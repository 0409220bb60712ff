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

A word of several tokens is scored by the log likelihood of all its tokens, and q(class) is the
softmax of these scores. A causal model scores each token given the tokens before it (Brown et al.,
section 2.4, where the score is also divided by the number of tokens); a masked model scores all at
as many masks (Schick & Schütze 2021, section 3.1, https://arxiv.org/abs/2009.07118).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from adapterhub.config.options import option
from adapterhub.data.examples import Example
from adapterhub.errors import ConfigError, DataError, counted
from adapterhub.tasks.classification import OfTexts, OneClass, best_of
from adapterhub.tasks.common.base import Encoded, Prediction, one_row_each, register_task
from adapterhub.tasks.common.batches import (
    IGNORED,
    Passed,
    Row,
    Setting,
    cut_text,
    each_row,
    without_end,
)
from adapterhub.tasks.common.few_shot import SHOTS_HELP, FewShot, Shot, text_room
from adapterhub.tasks.common.shared_prefix import SharedPrefix, answer_scores, shared_prefix

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FIELDS = re.compile(r"\{(text|pair|mask)\}")


@register_task
@dataclass(frozen=True)
class Prompted(FewShot, OneClass, OfTexts):
    """One class per text or pair, scored by a language model as a word.

    Rows of `train.csv`:

        text,label
        a joy to watch,1
        "dull, and far too long",0

    `words` has one or several words for each label; the template marks where they are predicted.
    `model: causal-lm` uses a causal language model. Long labels are less likely than short ones:
    `length_normalized` compares the mean of their tokens.

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
    length_normalized: bool = option(
        False, "score words by the mean log likelihood of their tokens, not the sum", omitted=True
    )

    shots: int = option(0, SHOTS_HELP + "; so many of each label", omitted=True)

    name = "prompted"
    summary = "classification by a prompt and label words, also zero-shot and few-shot"

    def __post_init__(self) -> None:
        words = {str(label): word for label, word in self.words.items()}
        object.__setattr__(self, "words", words)
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
        if self.shots < 0:
            raise ConfigError(f"shots is {self.shots}", expected="0 or more examples of each label")
        if len(self.words) < 2:
            raise ConfigError(
                "words has fewer than two labels",
                offenders=[f"{label}: {word}" for label, word in words.items()],
                expected="a word for each of two labels or more: {0: WORD, 1: WORD}",
            )
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
        """Reject labels without a word."""
        counts = Counter(str(e.label) for e in examples if str(e.label) not in self.words)
        if counts:
            raise DataError(
                "the data has labels without a word",
                offenders=[f"{label!r}: {counted(n, 'time')}" for label, n in counts.items()],
                expected=f"one of {', '.join(map(repr, self.words))}",
                hint=f"a word for each label: words={{{next(iter(counts))}: WORD, ...}}",
            )

    def pools(self, examples: Sequence[Example]) -> dict[str, list[Shot]]:
        """Return the examples of each label that has a word."""
        return {n: [_as_option(e) for e in examples if str(e.label) == n] for n in self.words}

    # Rows

    def encode(self, examples: Sequence[Example], setting: Setting, *, labelled: bool) -> Encoded:
        """Fill the template; `position` is where the label word is predicted."""
        answers = self.answer_ids(setting.tokenizer)
        rows: list[Row] = []
        for example in examples:
            ids, position = self._prompt(example, setting, max(map(len, answers.values())))
            row: Row = {"input_ids": ids, "position": position}
            if labelled:
                answer = answers[str(example.label)]
                if self.head == "causal-lm":
                    row |= {"input_ids": [*ids, *answer], "labels": [IGNORED] * len(ids) + answer}
                else:
                    row["input_ids"] = _with_masks(row, len(answer))
                    row["labels"] = [IGNORED] * len(row["input_ids"])
                    row["labels"][position : position + len(answer)] = answer
            row["attention_mask"] = [1] * len(row["input_ids"])
            rows.append(row)
        return one_row_each(self, examples, setting, rows)

    def fits(self, row: Row, setting: Setting) -> bool:
        """Return False: the room for the texts depends on the filled template."""
        return False

    def _prompt(self, example: Example, setting: Setting, longest: int) -> tuple[list[int], int]:
        """Return the ids of a prompt, and the position where the label word is predicted.

        The prompt leaves room for a word of `longest` tokens.
        """
        tokenizer = setting.tokenizer
        causal = self.head == "causal-lm"
        mask = "" if causal else str(tokenizer.mask_token)
        texts = [t for t in (example.text, example.pair) if t is not None]
        shots = "".join(
            f"{self._filled(self.words[label], *shown)}\n"
            for *shown, label in self.shots_before(*texts)
        )
        frame = self._filled(mask, *[""] * len(texts))
        room = text_room(shots, frame, longest - (not causal), setting)
        cut = [cut_text(t, tokenizer, max(room // len(texts), 1)) for t in texts]
        filled = shots + self._filled(mask, *cut)
        ids: list[int] = tokenizer(filled.rstrip() if causal else filled)["input_ids"]
        if causal:
            ids = without_end(ids, tokenizer)
            return ids, len(ids) - 1
        return ids, ids.index(tokenizer.mask_token_id)

    def _filled(self, mask: str, text: str, pair: str = "") -> str:
        values = {"text": text, "pair": pair, "mask": mask}
        return _FIELDS.sub(lambda match: values[match.group(1)], self.template)

    def answer_ids(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
        """Return the tokens of each label's word, as it follows a text and a space.

        Raises:
            ConfigError: a word has an unknown token, two words are equal, or there is no mask
                token.
        """
        if self.head == "masked-lm" and tokenizer.mask_token_id is None:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path} has no mask token",
                hint="the option model: prompted(model=causal-lm, ...)",
            )
        answers = {label: _following(word, tokenizer) for label, word in self.words.items()}
        wrong = [
            f"{self.words[label]!r}: {' '.join(tokenizer.convert_ids_to_tokens(ids)) or 'no token'}"
            for label, ids in answers.items()
            if not ids or tokenizer.unk_token_id in ids
        ]
        if wrong or len({tuple(ids) for ids in answers.values()}) < len(answers):
            raise ConfigError(
                "label words that the tokenizer does not tell apart",
                offenders=wrong or [f"{label}: {word}" for label, word in self.words.items()],
                expected="a different word for each label, of tokens that the vocabulary has",
            )
        return answers

    def padding_side(self, setting: Setting) -> str:
        """Return the right side: padding there keeps the positions of the words."""
        return "right"

    def collate(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """Pad rows without `position`, which is not a model input."""
        inputs = [{k: v for k, v in row.items() if k != "position"} for row in rows]
        return super().collate(inputs, setting)

    # Predictions

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Return the class with the most probable word, with the softmax over the words."""
        import torch  # slow to import

        if not data.examples:
            return []
        prompts = self.encode(data.examples, data.setting, labelled=False)
        answers = [*self.answer_ids(data.setting.tokenizer).values()]
        if max(map(len, answers)) == 1:
            prefix = shared_prefix(model, prompts.rows) if self.head == "causal-lm" else None
            scores = _token_scores(model, prompts, [i for (i,) in answers], batch_size, prefix)
        elif self.head == "causal-lm":
            scores = answer_scores(model, prompts, answers, batch_size)
        else:
            scores = _mask_scores(model, prompts, answers, batch_size)
        lengths = torch.tensor([len(a) if self.length_normalized else 1 for a in answers])
        shares = [(torch.tensor(each) / lengths).softmax(-1).tolist() for each in scores]
        return [best_of(dict(zip(self.words, each, strict=True))) for each in shares]


def _following(word: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a word after another word."""
    start, whole, alone = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in ("a", f"a {word}", f" {word}")
    )
    # A SentencePiece tokenizer may add a space before each text, in addition to the word's.
    return list(whole[len(start) :] if whole[: len(start)] == start else alone)


def _with_masks(row: Row, count: int) -> list[int]:
    """Return the tokens of a prompt with several masks instead of one."""
    ids, position = row["input_ids"], row["position"]
    return [*ids[:position], *[ids[position]] * count, *ids[position + 1 :]]


def _token_scores(
    model: PreTrainedModel,
    prompts: Encoded,
    words: list[int],
    batch_size: int,
    prefix: SharedPrefix | None,
) -> list[list[float]]:
    """Return the logit of each word, a single token, for each prompt."""

    def read(passed: Passed) -> Iterator[list[float]]:
        for logits, index in zip(passed.output.logits, passed.indices, strict=True):
            position = prompts.rows[index]["position"] - passed.skipped
            yield logits[position][words].float().tolist()

    return each_row(model, prompts, batch_size, read, prefix=prefix)


def _mask_scores(
    model: PreTrainedModel, prompts: Encoded, answers: Sequence[list[int]], batch_size: int
) -> list[list[float]]:
    """Return the log likelihood of each answer at as many masks, for each prompt."""
    by_answer: dict[int, tuple[float, ...]] = {}
    for count in {len(answer) for answer in answers}:
        rows = [row | {"input_ids": _with_masks(row, count)} for row in prompts.rows]
        rows = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]
        own = {i: answer for i, answer in enumerate(answers) if len(answer) == count}

        def read(passed: Passed, own: dict[int, list[int]] = own) -> Iterator[list[float]]:
            for logits, index in zip(passed.output.logits, passed.indices, strict=True):
                first = prompts.rows[index]["position"]
                logs = logits[first:][: len(own[min(own)])].float().log_softmax(-1)
                yield [float(logs[:, answer].diagonal().sum()) for answer in own.values()]

        scores = each_row(model, replace(prompts, rows=rows), batch_size, read)
        by_answer |= zip(own, zip(*scores, strict=True), strict=True)
    return [*map(list, zip(*(by_answer[i] for i in range(len(answers))), strict=True))]


def _as_option(example: Example) -> Shot:
    texts = (example.text, example.pair) if example.pair is not None else (example.text,)
    return (*texts, str(example.label))

"""Log-probabilities of label names after a prompt, by the head of a language model.

    causal-lm    the name follows the prompt
    seq2seq      the prompt is encoded, and the name decoded
    masked-lm    the prompt ends with a mask for each token of the name

A name is scored by the mean log-probability of its tokens, so that longer ones are not worse for
their length alone. Names that need the same forward pass share it: all of one token, for example.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.tasks._rows import Row, cut_text, pad

CPU_TOKENS = 4096  # of a batch, with its padding
GPU_TOKENS = 32_768


@dataclass(frozen=True)
class LabelWords:
    """The tokens of a label's name, and of what a decoder gets before it."""

    ids: tuple[int, ...]
    before: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Pass:
    """A row of a forward pass, and where in its logits which tokens of which labels are scored."""

    inputs: Row
    example: int
    scored: dict[int, list[tuple[int, int]]]


class _Form:
    """How a causal language model is asked: the name follows the prompt."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer

    def possible(self) -> bool:
        """Return whether the tokenizer has what is needed."""
        return True

    def words(self, label: str) -> LabelWords:
        """Return the tokens of a label's name."""
        return LabelWords(tuple(self.tokenizer(f" {label}", add_special_tokens=False)["input_ids"]))

    def shared(self, words: LabelWords) -> Hashable:
        """Return what is equal for labels that share a pass."""
        return words.before, words.ids[:-1]

    def inputs(self, prompt: str, words: LabelWords) -> tuple[Row, int]:
        """Return the inputs of a pass, and the place in its logits of a label's first token."""
        ids = self.tokenizer(prompt)["input_ids"]
        ends = {self.tokenizer.eos_token_id, self.tokenizer.sep_token_id}
        ends -= {self.tokenizer.bos_token_id, None}
        ids = ids[:-1] if len(ids) > 1 and ids[-1] in ends else ids
        whole = [*ids, *words.ids[:-1]]
        return {"input_ids": whole, "attention_mask": [1] * len(whole)}, len(ids) - 1


class _DecodedForm(_Form):
    """How an encoder-decoder is asked: the prompt is encoded, and the name decoded."""

    def words(self, label: str) -> LabelWords:
        special = set(self.tokenizer.all_special_ids)
        ids = self.tokenizer(text_target=label)["input_ids"]
        own = [index for index, token in enumerate(ids) if token not in special]
        before = ids[: own[0]] if own else ()
        start = int(self.model.config.decoder_start_token_id)
        return LabelWords(tuple(ids[i] for i in own), (start, *before))

    def inputs(self, prompt: str, words: LabelWords) -> tuple[Row, int]:
        ids = self.tokenizer(prompt)["input_ids"]
        decoded = [*words.before, *words.ids[:-1]]
        row = {"input_ids": ids, "attention_mask": [1] * len(ids), "decoder_input_ids": decoded}
        return row, len(words.before) - 1


class _MaskedForm(_Form):
    """How a masked language model is asked: the prompt ends with a mask for each token."""

    def possible(self) -> bool:
        return self.tokenizer.mask_token_id is not None

    def shared(self, words: LabelWords) -> Hashable:
        return len(words.ids)

    def inputs(self, prompt: str, words: LabelWords) -> tuple[Row, int]:
        row = dict(self.tokenizer(f"{prompt} {str(self.tokenizer.mask_token) * len(words.ids)}"))
        mask = self.tokenizer.mask_token_id
        masks = [n for n, token in enumerate(row["input_ids"]) if token == mask]
        return row, masks[-len(words.ids)]


_FORMS = {"causal-lm": _Form, "seq2seq": _DecodedForm, "masked-lm": _MaskedForm}


class LabelScorer:
    """Scores the names of labels after prompts.

    Args:
        model: a language model.
        tokenizer: its tokenizer.
        kind: of the model: causal-lm, seq2seq or masked-lm.
        labels: the names.
        most: the longest input, in tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        kind: str,
        labels: Sequence[str],
        most: int,
    ) -> None:
        self.model, self.tokenizer, self.most = model, tokenizer, most
        self.form = _FORMS[kind](model, tokenizer)
        self.words = [self.form.words(label) for label in labels]

    @property
    def possible(self) -> bool:
        """Whether every label has tokens, and masks exist where they are needed."""
        unknown = self.tokenizer.unk_token_id
        known = all(words.ids and unknown not in words.ids for words in self.words)
        return known and self.form.possible()

    @property
    def passes(self) -> int:
        """The rows of forward passes that each prompt takes."""
        return len({self.form.shared(words) for words in self.words})

    def room(self, rest: str) -> int:
        """Return how many tokens are left for texts beside the rest of a prompt and any label."""
        longest = max(len(words.ids) for words in self.words)
        return self.most - len(self.tokenizer(rest)["input_ids"]) - longest

    def cut(self, texts: Sequence[str], room: int) -> list[str]:
        """Cut each of some texts to an equal share of the tokens that are left for them.

        Args:
            texts: the texts.
            room: what `room` returned.
        """
        return [cut_text(text, self.tokenizer, max(room // len(texts), 1)) for text in texts]

    def scores(self, prompts: Sequence[str]) -> list[list[float]]:
        """Return for each prompt the score of each label, in nats."""
        passes = [each for n, prompt in enumerate(prompts) for each in self._passes(n, prompt)]
        passes.sort(key=lambda each: len(each.inputs["input_ids"]))
        found = [[0.0] * len(self.words) for _ in prompts]
        for batch in self._batches(passes):
            logits = self._logits([each.inputs for each in batch])
            for each, row in zip(batch, logits, strict=True):
                places = sorted({place for pairs in each.scored.values() for place, _ in pairs})
                known = dict(zip(places, row[places].float().log_softmax(-1), strict=True))
                for label, pairs in each.scored.items():
                    values = [float(known[place][token]) for place, token in pairs]
                    found[each.example][label] = fmean(values)
        return found

    def _passes(self, example: int, prompt: str) -> Iterator[_Pass]:
        groups: dict[Hashable, list[int]] = {}
        for label, words in enumerate(self.words):
            groups.setdefault(self.form.shared(words), []).append(label)
        for labels in groups.values():
            inputs, first = self.form.inputs(prompt, self.words[labels[0]])
            scored = {n: [(first + i, token) for i, token in enumerate(self.words[n].ids)]
                      for n in labels}  # fmt: skip
            yield _Pass(inputs, example, scored)

    def _batches(self, passes: Sequence[_Pass]) -> Iterator[list[_Pass]]:
        limit = CPU_TOKENS if self.model.device.type == "cpu" else GPU_TOKENS
        batch: list[_Pass] = []
        for each in passes:
            if batch and (len(batch) + 1) * len(each.inputs["input_ids"]) > limit:
                yield batch
                batch = []
            batch.append(each)
        if batch:
            yield batch

    def _logits(self, rows: Sequence[Row]) -> Any:
        # On the right: the places of logits are counted from the start.
        batch = pad(rows, self.tokenizer, "right")
        inputs = {name: tensor.to(self.model.device) for name, tensor in batch.items()}
        with torch.inference_mode():
            return self.model(**inputs).logits

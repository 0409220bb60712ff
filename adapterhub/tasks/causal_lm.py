"""Causal language modelling: raw text, instructions with responses, or chats.

The loss is that of the response's tokens (of all tokens of raw text), each predicted from those
before it; the prompt only conditions. Texts shorter than the longest length may be packed into one
row: each keeps its own positions, and attends to itself alone (Krell et al. 2021,
https://arxiv.org/abs/2107.02027).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import regex
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.config.options import option
from adapterhub.data.examples import Example, read_rows, refuse, text_problem
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError
from adapterhub.tasks._base import (
    IGNORED,
    Encoded,
    Generated,
    Prediction,
    Row,
    Setting,
    Task,
    limit_of,
    pad,
    register_task,
)
from adapterhub.tasks._generation import Generation, generate, token_loss
from adapterhub.tasks._metrics import generation_metrics
from adapterhub.tasks.seq2seq import check_template, read_pairs

Tokens = list[tuple[int, bool]]
"""Token ids, and whether each is learned."""


@dataclass(frozen=True)
class Chat:
    """Messages, each a role and a content."""

    messages: tuple[tuple[str, str], ...]


@register_task
@dataclass(frozen=True)
class CausalLM(Generation, Task):
    """The next token, of responses or of raw text."""

    data: Literal["pairs", "chat", "text"] = option(
        "pairs", "prompts (text) with responses (label), chats (lists of messages), or raw text"
    )
    template: str | None = option(
        "{text}\n", "the prompt of a pair; null makes it a user's message of the chat template"
    )
    pack: bool = option(False, "put several texts into one row of the longest length")
    generate: bool = option(False, "generate at evaluation, for the exact match of responses")
    answer: str | None = option(
        None, "regular expression whose first group is what must match; null is all of a response"
    )

    name = "causal-lm"
    summary = "the next token: instructions, chats, raw text"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template is not None:
            check_template(self.template)
        if len(self.answer or "") > 1000:
            raise ConfigError(f"answer has {len(self.answer or '')} characters", expected="1000")
        try:
            groups = regex.compile(self.answer or "()").groups
        except (regex.error, RecursionError, MemoryError, OverflowError) as error:
            raise ConfigError(f"answer is no regular expression: {error}") from error
        if groups != 1:
            raise ConfigError(f"answer has {groups} groups", expected="one, as in '#### (.*)'")
        if self.generate and self.data == "text":
            raise ConfigError("raw text has no response to generate", hint="generate=false")

    @property
    def packs(self) -> bool:
        """By the option `pack`."""
        return self.pack

    @property
    def main_metric(self) -> str:
        """exact_match where evaluation generates, else loss."""
        return "exact_match" if self.generate else "loss"

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Any]:
        """By the option `data`."""
        if self.data == "chat":
            build = _chat_builder(options.text, labelled)
            return read_rows(source, options, split, [options.text], build)
        return read_pairs(source, options, split, labelled and self.data == "pairs")

    def example(self, fields: Sequence[str], options: DataOptions) -> Any:
        """A prompt, or a user's message."""
        return Chat((("user", fields[0]),)) if self.data == "chat" else Example(fields[0])

    def shown(self, example: Any) -> list[str]:
        """The prompt, or the last message."""
        return [example.messages[-1][1] if isinstance(example, Chat) else example.text]

    def encode(self, examples: Sequence[Any], setting: Setting, *, labelled: bool) -> Encoded:
        """Prompt and response as one row, and without `labelled` the prompt alone."""
        if not labelled:
            return self._prompts(examples, setting)
        rows: list[Row] = []
        owners: list[int] = []
        for index, example in enumerate(examples):
            tokens = self._tokens(example, setting.tokenizer)
            parts = (
                _chunks(tokens, limit_of(setting))
                if self.data == "text"
                else [_fitted(tokens, limit_of(setting))]
            )
            rows += [_row(part) for part in parts if len(part) > 1]
            owners += [index for part in parts if len(part) > 1]
        if self.pack:
            return Encoded(self, setting, tuple(examples), _pack(rows, limit_of(setting)), ())
        return Encoded(self, setting, tuple(examples), rows, tuple(owners))

    def _prompts(self, examples: Sequence[Any], setting: Setting) -> Encoded:
        room = max(min(limit_of(setting), setting.positions - self.new_tokens), 1)
        rows = []
        for example in examples:
            ids = [i for i, _ in self._tokens(example, setting.tokenizer, prompt=True)][-room:]
            rows.append({"input_ids": ids, "attention_mask": [1] * len(ids)})
        return Encoded(self, setting, tuple(examples), rows, tuple(range(len(rows))))

    def _tokens(
        self, example: Any, tokenizer: PreTrainedTokenizerBase, *, prompt: bool = False
    ) -> Tokens:
        """An example's tokens; with `prompt` those up to the (last) response."""
        if isinstance(example, Chat):
            return _chat_tokens(example.messages, tokenizer, prompt)
        if self.data == "pairs" and self.template is None:
            messages = [("user", example.text), ("assistant", str(example.label or ""))]
            return _chat_tokens(messages, tokenizer, prompt)
        if self.data == "text":
            ids = _start(example.text, tokenizer)
            ends = [] if prompt else _end(tokenizer)
            return [(i, True) for i in [*ids, *ends]]
        asked = _start(str(self.template).replace("{text}", example.text), tokenizer)
        if prompt:
            return [(i, False) for i in asked]
        response = tokenizer(str(example.label), add_special_tokens=False)["input_ids"]
        learned = [*response, *_end(tokenizer)]
        return [*((i, False) for i in asked), *((i, True) for i in learned)]

    def collate(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """Padded behind, where no token looks."""
        return pad(rows, setting.tokenizer, "right")

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """A generated response, or the text that follows."""
        prompts = self._prompts(data.examples, data.setting)
        return list(generate(model, prompts, batch_size, self))

    def metrics(
        self, examples: Sequence[Any], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """exact_match, of what the option `answer` finds in both."""
        known = [e.messages[-1][1] if isinstance(e, Chat) else str(e.label) for e in examples]
        found = [p.text for p in predictions if isinstance(p, Generated)]
        texts = ([self._answer(text) for text in side] for side in (known, found))
        return generation_metrics("exact", *texts)

    def _answer(self, text: str) -> str:
        try:
            # The pattern may come with an adapter, and some take for ever.
            match = regex.search(self.answer, text, timeout=2) if self.answer else None
        except TimeoutError as error:
            raise ConfigError(
                f"answer takes too long on {text[:80]!r}", hint="no repetition in a repetition"
            ) from error
        return match.group(1) if match else text

    def evaluate(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> dict[str, float]:
        """loss and perplexity of the learned tokens, and exact_match where it generates."""
        metrics = super().evaluate(model, data, batch_size) if self.generate else {}
        return metrics | token_loss(model, data, batch_size, shifted=True)


def _start(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of a text with what the tokenizer puts in front, and not what it puts behind."""
    ids: list[int] = tokenizer(text)["input_ids"]
    ends = {tokenizer.eos_token_id, tokenizer.sep_token_id} - {tokenizer.bos_token_id, None}
    return ids[:-1] if len(ids) > 1 and ids[-1] in ends else ids


def _end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def _chat_tokens(
    messages: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase, prompt: bool
) -> Tokens:
    """A chat by the tokenizer's template; what the assistant says is learned."""
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template",
            expected="a backbone that was trained on chats",
            hint="pairs with a template: --task \"causal-lm(template='{text}')\"",
        )
    turns = [{"role": role, "content": content} for role, content in messages]
    if prompt and turns[-1]["role"] == "assistant":
        turns.pop()

    def written(count: int, ask: bool = False) -> str:
        text = tokenizer.apply_chat_template(
            turns[:count], tokenize=False, add_generation_prompt=ask
        )
        return str(text)

    pieces: list[tuple[str, bool]] = []
    done = ""
    for i, turn in enumerate(turns, start=1):
        if turn["role"] == "assistant":
            asked, whole = written(i - 1, ask=True), written(i)
            if not (asked.startswith(done) and whole.startswith(asked)):
                raise ConfigError(
                    f"the chat template of {tokenizer.name_or_path} rewrites earlier messages",
                    expected="a template where each message adds to the text before it",
                )
            pieces += [(asked[len(done) :], False), (whole[len(asked) :], True)]
            done = whole
    if prompt:
        pieces.append((written(len(turns), ask=True)[len(done) :], False))
    return [
        (i, learned)
        for text, learned in pieces
        for i in tokenizer(text, add_special_tokens=False)["input_ids"]
    ]


def _chat_builder(column: str, labelled: bool) -> Callable[[Any], Chat]:
    def build(value: Any) -> Chat:
        if not isinstance(value, list) or not all(map(_is_message, value)) or not value:
            raise ValueError(f"{column!r} is not a list of messages {{role: ..., content: ...}}")
        chat = Chat(tuple((m["role"], m["content"]) for m in value))
        last = chat.messages[-1][0]
        refuse("the last message is not the assistant's" * (labelled and last != "assistant"))
        refuse(*(text_problem(content, column) for _, content in chat.messages))
        return chat

    return build


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )


def _fitted(tokens: Tokens, limit: int) -> Tokens:
    """At most `limit` tokens: first the start of the prompt goes, then the end of the response."""
    prompt = next((i for i, (_, learned) in enumerate(tokens) if learned), len(tokens))
    drop = max(min(len(tokens) - limit, prompt - 1), 0)
    return tokens[drop:][:limit]


def _chunks(tokens: Tokens, limit: int) -> list[Tokens]:
    return [tokens[i : i + limit] for i in range(0, len(tokens), limit)]


def _row(tokens: Tokens) -> Row:
    return {
        "input_ids": [i for i, _ in tokens],
        "attention_mask": [1] * len(tokens),
        "labels": [i if learned else IGNORED for i, learned in tokens],
    }


def _pack(rows: Iterable[Row], limit: int) -> list[Row]:
    """Rows one after another, as many as fit. Positions start anew with each, which is what tells
    the backbone to keep them apart; so there is no attention mask."""
    packed: list[Row] = []
    for row in rows:
        length = len(row["input_ids"])
        if not packed or len(packed[-1]["input_ids"]) + length > limit:
            packed.append({"input_ids": [], "labels": [], "position_ids": []})
        packed[-1]["input_ids"] += row["input_ids"]
        packed[-1]["labels"] += [IGNORED, *row["labels"][1:]]
        packed[-1]["position_ids"] += range(length)
    return packed

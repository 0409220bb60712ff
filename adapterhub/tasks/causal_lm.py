"""Causal language modelling: prompts with responses, chats or raw text.

    example      a prompt and its response, a chat, or a raw text
    row          the tokens; `labels`: the response's tokens (all tokens of raw text)
    prediction   a generated response, or the continuation of a text
    metrics      loss and perplexity; with `generate` the exact match of responses

The loss covers only the labelled tokens, each predicted from those before it. Short examples can be
packed into one row: each keeps its own positions and attends only to itself (Krell et al. 2021,
https://arxiv.org/abs/2107.02027).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import regex

from adapterhub.config.options import option
from adapterhub.data.chat_formats import chat_column, is_chat, messages_of
from adapterhub.data.columns import WANTS, ColumnChoice
from adapterhub.data.examples import Example, read_rows, refuse, text_problem
from adapterhub.data.options import DataOptions
from adapterhub.data.text_stream import TextStream
from adapterhub.errors import ConfigError
from adapterhub.tasks._base import Encoded, Generated, Prediction, Task
from adapterhub.tasks._chat_template import chat_text
from adapterhub.tasks._generation import (
    TOKEN_METRICS,
    Generation,
    TokenLoss,
    generate,
    text_outcome,
    token_loss,
)
from adapterhub.tasks._metrics import generation_metrics
from adapterhub.tasks._registry import register_task
from adapterhub.tasks._rows import IGNORED, Row, Setting, limit_of
from adapterhub.tasks._windows import Frame, Windows, around_text, stream_tokens
from adapterhub.tasks.seq2seq import check_template, fitted_pairs, read_pairs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Tokens = list[tuple[int, bool]]
"""Token ids, and whether each is a label."""


@dataclass(frozen=True)
class Chat:
    """A list of messages, each a (role, content)."""

    messages: tuple[tuple[str, str], ...]


@register_task
@dataclass(frozen=True)
class CausalLM(Generation, Task):
    """Next-token prediction on responses, chats or raw text.

    Rows of `train.jsonl`:

        {"prompt": "Name a prime number.", "response": "7"}
        {"prompt": "Name an even number.", "response": "12"}

    With `data: chat` a row has a list of messages, each with a role and a content; with
    `data: text` it has one text. `template: null` applies the tokenizer's chat template to pairs.
    Backbones whose language model attends to later tokens are refused: they would read the answer.

    `predict` prints the generated response:

        7
        {"generated": "7"}
    """

    data: Literal["pairs", "chat", "text"] = option(
        "pairs", "prompts (text) and responses (label), chats (lists of messages), or raw text"
    )
    template: str | None = option(
        "{text}\n", "prompt of a pair; null applies the tokenizer's chat template"
    )
    pack: bool = option(False, "pack several examples into one row of max_length tokens")
    generate: bool = option(False, "generate in evaluation and report exact_match")
    answer: str | None = option(
        None, "regular expression whose group must match; null compares whole responses"
    )

    name = "causal-lm"
    lower_is_better = TOKEN_METRICS
    most_tokens = 1024
    cut_note = "a prompt is cut at its start, and a response only after its prompt"
    summary = "next-token prediction: instructions, chats, raw text"
    columns = WANTS["targets"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template is not None:
            check_template(self.template)
        if len(self.answer or "") > 1000:
            raise ConfigError(
                f"answer has {len(self.answer or '')} characters", expected="1000 at most"
            )
        try:
            groups = regex.compile(self.answer or "()").groups
        except (regex.error, RecursionError, MemoryError, OverflowError) as error:
            raise ConfigError(f"answer is not a regular expression: {error}") from error
        if groups != 1:
            raise ConfigError(f"answer has {groups} groups", expected="one: '#### (.*)'")
        if self.generate and self.data == "text":
            raise ConfigError("raw text has no response to generate", hint="generate=false")

    @property
    def packs(self) -> bool:
        """The option `pack`."""
        return self.pack

    @property
    def streams(self) -> bool:
        """Whether the data are raw texts."""
        return self.data == "text"

    @property
    def outcomes(self) -> str:  # type: ignore[override]
        """Texts if evaluation generates, else losses."""
        return "texts" if self.generate else "losses"

    @property
    def main_metric(self) -> str:
        """exact_match if evaluation generates, else loss."""
        return "exact_match" if self.generate else "loss"

    # Examples

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Any]:
        """Read pairs, chats or raw texts, by the option `data`."""
        if self.data == "chat":
            options = chat_column(source, options, split).options
            build = _chat_builder(options.text_column, labelled)
            return read_rows(source, options, split, [options.text_column], build)
        return read_pairs(source, options, split, labelled and self.data == "pairs")

    def fitted(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> tuple[Task, ColumnChoice]:
        """Choose columns; data that is chats beyond doubt is read as chats."""
        if self.data == "chat" or (self.data == "pairs" and is_chat(source, options, split)):
            return replace(self, data="chat"), chat_column(source, options, split)
        return self, fitted_pairs(source, options, split, labelled and self.data == "pairs")

    def example(self, fields: Sequence[str], options: DataOptions) -> Any:
        """Build a prompt, or a chat with one user message."""
        return Chat((("user", fields[0]),)) if self.data == "chat" else Example(fields[0])

    def shown(self, example: Any) -> list[str]:
        """Return the prompt or the last message."""
        return [example.messages[-1][1] if isinstance(example, Chat) else example.text]

    # Rows

    def encode(self, examples: Sequence[Any], setting: Setting, *, labelled: bool) -> Encoded:
        """Encode prompt and response as one row; without `labelled` only the prompt."""
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
            trainable = [_row(part) for part in parts if len(part) > 1]
            rows += trainable
            owners += [index] * len(trainable)
        if self.pack:
            return Encoded(self, setting, tuple(examples), _pack(rows, limit_of(setting)), ())
        return Encoded(self, setting, tuple(examples), rows, tuple(owners))

    def encode_stream(self, texts: TextStream, setting: Setting) -> Encoded:
        """Cut streamed text into windows; each token but the first of a window is learned."""
        begin, _ = around_text(setting.tokenizer)
        frame = Frame(begin, tuple(_end(setting.tokenizer)))

        def build(ids: list[int], starts: list[int]) -> Row:
            return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}

        tokens = stream_tokens(texts, setting.tokenizer, frame)
        return Encoded(self, setting, (), Windows(tokens, frame, limit_of(setting), build), ())

    def unlimited(self) -> CausalLM:
        """Return the task without packing."""
        return replace(self, pack=False)

    def _prompts(self, examples: Sequence[Any], setting: Setting) -> Encoded:
        """Encode prompts, cut from the left so that `new_tokens` more positions are free."""
        room = max(min(limit_of(setting), setting.positions - self.new_tokens), 1)
        rows = []
        for example in examples:
            ids = [i for i, _ in self._tokens(example, setting.tokenizer, prompt=True)][-room:]
            rows.append({"input_ids": ids, "attention_mask": [1] * len(ids)})
        return Encoded(self, setting, tuple(examples), rows, tuple(range(len(rows))))

    def _tokens(
        self, example: Any, tokenizer: PreTrainedTokenizerBase, *, prompt: bool = False
    ) -> Tokens:
        """Tokenize an example; with `prompt` only up to the (last) response."""
        if isinstance(example, Chat):
            return _chat_tokens(example.messages, tokenizer, prompt)
        if self.data == "pairs" and self.template is None:
            messages = [("user", example.text), ("assistant", str(example.label or ""))]
            return _chat_tokens(messages, tokenizer, prompt)
        if self.data == "text":
            ids = _start(example.text, tokenizer)
            ends = [] if prompt or not example.text.strip() else _end(tokenizer)
            return [(i, True) for i in [*ids, *ends]]
        filled = str(self.template).replace("{text}", example.text)
        tokens = [(i, False) for i in _start(filled, tokenizer)]
        if not prompt:
            response = tokenizer(str(example.label), add_special_tokens=False)["input_ids"]
            tokens += [(i, True) for i in [*response, *_end(tokenizer)]]
        return tokens

    def padding_side(self, setting: Setting) -> str:
        """Return the right: no token attends to it."""
        return "right"

    # Predictions

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Generate a response, or the continuation of a raw text."""
        prompts = self._prompts(data.examples, data.setting)
        return list(generate(model, prompts, batch_size, self))

    # Metrics

    def metric_names(self, examples: Sequence[Any]) -> tuple[str, ...]:
        """Return loss and perplexity, and with `generate` exact_match."""
        return (*["exact_match"] * self.generate, "loss", "perplexity")

    def metrics(
        self, examples: Sequence[Any], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Compute exact_match, between what the option `answer` matches in both texts."""
        expected = [e.messages[-1][1] if isinstance(e, Chat) else str(e.label) for e in examples]
        generated = [p.text for p in predictions if isinstance(p, Generated)]
        answers = ([self._answer(text) for text in texts] for texts in (expected, generated))
        return generation_metrics("exact", *answers)

    def _answer(self, text: str) -> str:
        try:
            # The pattern may come with a downloaded adapter, and some patterns never finish.
            match = regex.search(self.answer, text, timeout=2) if self.answer else None
        except TimeoutError as error:
            raise ConfigError(
                f"answer takes too long to match {text[:80]!r}", hint="avoid nested repetitions"
            ) from error
        return match.group(1) if match else text

    def evaluate(
        self,
        model: PreTrainedModel,
        data: Encoded,
        batch_size: int,
        record: list[Prediction] | None = None,
    ) -> dict[str, float]:
        """Compute loss and perplexity of the labels, and with `generate` exact_match."""
        if not self.generate:
            return token_loss(model, data, batch_size, shifted=True, record=record)
        metrics = super().evaluate(model, data, batch_size, record)
        return metrics | token_loss(model, data, batch_size, shifted=True)

    def outcome(self, example: Any, prediction: Prediction) -> dict[str, Any]:
        """Return both texts and whether they match, or the loss of the response."""
        texts = self._all_texts(example)
        if isinstance(prediction, TokenLoss):
            return {"texts": [t for t in texts if t], **prediction.as_dict()}
        score = self.metrics([example], [prediction])["exact_match"]
        return text_outcome(texts[:-1], texts[-1], prediction) | {"score": score}

    def _all_texts(self, example: Any) -> list[str]:
        """Return the prompt and the response; the response of raw text is empty."""
        if isinstance(example, Chat):
            *before, (_, last) = example.messages
            return ["\n".join(f"{role}: {content}" for role, content in before), last]
        return [example.text, str(example.label or "")]


def _start(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenize a text with the special tokens at its start, but not at its end."""
    ids: list[int] = tokenizer(text)["input_ids"]
    ends = {tokenizer.eos_token_id, tokenizer.sep_token_id} - {tokenizer.bos_token_id, None}
    return ids[:-1] if len(ids) > 1 and ids[-1] in ends else ids


def _end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def _chat_tokens(
    messages: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase, prompt: bool
) -> Tokens:
    """Tokenize a chat by the tokenizer's template; the assistant's messages are labels."""
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template",
            expected="a backbone trained on chats",
            hint="pairs with a template: --task \"causal-lm(template='{text}')\"",
        )
    turns = [{"role": role, "content": content} for role, content in messages]
    if prompt and turns[-1]["role"] == "assistant":
        turns.pop()

    pieces = _chat_pieces(turns, tokenizer, prompt)
    return [
        (i, learned)
        for text, learned in pieces
        for i in tokenizer(text, add_special_tokens=False)["input_ids"]
    ]


def _chat_pieces(
    turns: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, prompt: bool
) -> list[tuple[str, bool]]:
    """Split the text of a chat into pieces of (text, whether it is the assistant's).

    The template formats whole chats only, so longer and longer beginnings are formatted.
    """

    def formatted(count: int, generation_prompt: bool = False) -> str:
        return chat_text(tokenizer, turns[:count], generation_prompt=generation_prompt)

    pieces: list[tuple[str, bool]] = []
    done = ""
    for i, turn in enumerate(turns, start=1):
        if turn["role"] != "assistant":
            continue
        before, through = formatted(i - 1, generation_prompt=True), formatted(i)
        if not (before.startswith(done) and through.startswith(before)):
            raise ConfigError(
                f"the chat template of {tokenizer.name_or_path} rewrites earlier messages",
                expected="a template in which each message only adds text",
            )
        pieces += [(before[len(done) :], False), (through[len(before) :], True)]
        done = through
    if prompt:
        pieces.append((formatted(len(turns), generation_prompt=True)[len(done) :], False))
    return pieces


def _chat_builder(column: str, labelled: bool) -> Callable[[Any], Chat]:
    def build(value: Any) -> Chat:
        messages = messages_of(value)
        if messages is None:
            raise ValueError(f"{column!r} is not a list of messages {{role: ..., content: ...}}")
        chat = Chat(messages)
        last = chat.messages[-1][0]
        refuse("the last message is not the assistant's" * (labelled and last != "assistant"))
        refuse(*(_message_problem(role, text, labelled) for role, text in chat.messages))
        return chat

    return build


def _message_problem(role: str, content: str, labelled: bool) -> str:
    """Describe what is wrong with a message; without instructions, a system message is empty."""
    return text_problem(content, role, allow_empty=not labelled or role == "system")


def _fitted(tokens: Tokens, limit: int) -> Tokens:
    """Cut tokens to `limit`: first from the start of the prompt, then from the end."""
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
    """Concatenate rows, as many as fit in `limit` tokens.

    Positions restart with each example, by which the backbone separates them; there is no
    attention mask.
    """
    packed: list[Row] = []
    for row in rows:
        length = len(row["input_ids"])
        if not packed or len(packed[-1]["input_ids"]) + length > limit:
            packed.append({"input_ids": [], "labels": [], "position_ids": []})
        packed[-1]["input_ids"] += row["input_ids"]
        packed[-1]["labels"] += [IGNORED, *row["labels"][1:]]
        packed[-1]["position_ids"] += range(length)
    return packed

"""Causal language modelling: prompts with responses, chats or raw text.

    example      a prompt and its response, a chat, or a raw text
    row          the tokens; `labels`: the response's tokens (all tokens of raw text)
    prediction   a generated response, or the continuation of a text
    metrics      loss and perplexity; with `generate` the exact match of responses

The loss covers only the labelled tokens, each predicted from the tokens before it. Short examples
can be packed into one row: each keeps its own positions and attends only to itself (Krell et al.
2021, https://arxiv.org/abs/2107.02027).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import regex

from adapterhub.backbones.end_tokens import ended, template_stops, text_stops
from adapterhub.config.options import option
from adapterhub.data.chat_formats import (
    ARGUMENTS,
    Message,
    as_read,
    behind_turns,
    chat_column,
    columns_beside,
    is_chat,
    is_learned,
    may_be_empty,
    messages_of,
    opening,
    shared_arguments,
    turns_of,
    weight_problem,
    with_arguments,
    with_beside,
)
from adapterhub.data.columns import WANTS, ColumnChoice
from adapterhub.data.examples import Example, Grouped, read_rows, refuse, text_problem
from adapterhub.data.options import DataOptions
from adapterhub.data.tables import read_table
from adapterhub.errors import ConfigError, one_line
from adapterhub.tasks.common.base import Encoded, Generated, Prediction, Task, register_task
from adapterhub.tasks.common.batches import IGNORED, Row, Setting, limit_of, without_end
from adapterhub.tasks.common.chat_template import (
    Span,
    answer_spans,
    chat_text,
    fitted_chat,
    marked_spans,
    unused_keys,
)
from adapterhub.tasks.common.few_shot import (
    EXAMPLES_HELP,
    SEPARATOR,
    SHOTS_HELP,
    FewShot,
    Shot,
    check_shots,
    shot_limit,
)
from adapterhub.tasks.common.language_models import (
    Generation,
    LearnsTokens,
    TokenLoss,
    generate,
    text_outcome,
)
from adapterhub.tasks.common.metrics import generation_metrics
from adapterhub.tasks.common.packing import Frame, around_text
from adapterhub.tasks.seq2seq import check_template, fitted_pairs, read_pairs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Tokens = list[tuple[int, bool]]
"""Token ids, and whether each is a label."""
AUTO, PLAIN = "auto", "{text}\n"
TEMPLATE_HELP = (
    "prompt of a pair; auto: by the tokenizer's chat template, or '{text}\\n' if it has none "
    "(null: by the chat template)"
)


@dataclass(frozen=True)
class Chat(Grouped):
    """A list of messages."""

    messages: tuple[Message, ...]


@register_task
@dataclass(frozen=True)
class CausalLM(FewShot, Generation, LearnsTokens):
    r"""Next-token prediction on responses, chats or raw text.

    Rows of `train.jsonl`:

        {"prompt": "Name a prime number.", "response": "7"}
        {"prompt": "Name an even number.", "response": "12"}

    With `data: chat` a row has a list of messages, each with a role and a content; with
    `data: text` it has one text. Pairs are formatted by the tokenizer's chat template, if it has
    one; `template: "{text}\n"` skips it. Backbones whose language model attends to later tokens are
    rejected: they would read the answer.

    `predict` prints the generated response:

        7
        {"generated": "7"}
    """

    data: Literal["pairs", "chat", "text"] = option(
        "pairs", "prompts (text) and responses (label), chats (lists of messages), or raw text"
    )
    template: str | None = option(AUTO, TEMPLATE_HELP)
    pack: bool = option(False, "pack several examples into one row of max_length tokens")
    generate: bool = option(False, "generate in evaluation and report exact_match")
    answer: str | None = option(
        None, "regular expression whose group must match (null: none, whole responses)"
    )
    template_arguments: str | None = option(
        None,
        "arguments of the chat template, as JSON, for chats without their own (null: those that "
        "all training chats have)",
        omitted=True,
    )
    examples: tuple[Shot, ...] = option((), EXAMPLES_HELP, omitted=True)
    shots: int = option(0, SHOTS_HELP, omitted=True)

    name = "causal-lm"
    most_tokens = 1024
    cut_note = "a prompt is cut at its start, and a response only after its prompt"
    summary = "next-token prediction: instructions, chats, raw text"
    columns = WANTS["targets"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template not in (None, AUTO):
            check_template(str(self.template))
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
        if self.template_arguments is not None:
            self._arguments()
        if self.generate and self.data == "text":
            raise ConfigError("raw text has no response to generate", hint="generate=false")
        check_shots(self.shots, self.examples)
        if (self.examples or self.shots) and self.data == "text":
            raise ConfigError(
                "raw text takes no few-shot examples", expected="prompts and responses, or chats"
            )

    def _arguments(self) -> dict[str, Any]:
        try:
            arguments = json.loads(self.template_arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ConfigError(
                f"template_arguments {one_line(str(self.template_arguments), 100)!r} is not an "
                f"object",
                expected='JSON: {"enable_thinking": false}',
            )
        return arguments

    def for_examples(self, examples: Sequence[Any]) -> CausalLM:
        """Return the task with the chat template arguments that all chats share.

        Chats at prediction are then formatted as in training.
        """
        if self.template_arguments is not None or not all(isinstance(e, Chat) for e in examples):
            return self
        shared = shared_arguments(example.messages for example in examples)
        text = json.dumps(shared, ensure_ascii=False, sort_keys=True) if shared else None
        return replace(self, template_arguments=text)

    @property
    def packs(self) -> bool:
        """The option `pack`."""
        return self.pack

    @property
    def streams(self) -> bool:
        """Return whether the data is raw text."""
        return self.data == "text"

    @property
    def outcomes(self) -> str:  # type: ignore[override]
        """Texts if evaluation generates, else losses."""
        return "texts" if self.generate else "losses"

    @property
    def main_metric(self) -> str:
        """exact_match if evaluation generates, else loss."""
        return "exact_match" if self.generate else "loss"

    def for_model(self, model: PreTrainedModel) -> CausalLM:
        """Return the task with the template that the tokenizer of the backbone chooses."""
        return replace(self, template=chosen_template(self.template, model))

    @property
    def model_note(self) -> str:
        """Return whether the tokenizer's chat template formats the pairs."""
        return template_note(self.name) if self.data == "pairs" and self.template is None else ""

    # Examples

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Any]:
        """Read pairs, chats or raw texts, by the option `data`."""
        if self.data == "chat":
            options = chat_column(source, options, split).options
            beside = columns_beside(read_table(source, options, split))
            build = _chat_builder(options.text_column, beside, labelled)
            return read_rows(source, options, split, [options.text_column, *beside], build)
        return read_pairs(source, options, split, labelled and self.data == "pairs")

    def fitted(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> tuple[Task, ColumnChoice]:
        """Infer the columns; data that clearly holds chats is read as chats."""
        if self.data == "chat" or (self.data == "pairs" and is_chat(source, options, split)):
            return replace(self, data="chat"), chat_column(source, options, split)
        return self, fitted_pairs(source, options, split, labelled and self.data == "pairs")

    def joined(self, other: Task) -> Task | None:
        """Return the task for pairs if one is for chats, which are recognized by their type."""
        forms = {self.data, other.data} if isinstance(other, CausalLM) else set()
        if forms == {"pairs", "chat"} and replace(self, data=other.data) == other:  # type: ignore[attr-defined]
            return replace(self, data="pairs")
        return super().joined(other)

    def example(self, fields: Sequence[str], options: DataOptions) -> Any:
        """Build a prompt, or a chat with one user message."""
        return Chat((("user", fields[0]),)) if self.data == "chat" else Example(fields[0])

    def chat_example(self, messages: tuple[Message, ...]) -> Chat | None:
        """Build a chat, if the tokenizer's chat template formats prompts."""
        chats = self.data == "chat" or (self.data == "pairs" and self.template is None)
        return Chat(messages) if chats else None

    def of_texts(self) -> CausalLM:
        """Return the task for raw texts."""
        return replace(self, data="text", generate=False, examples=(), shots=0)

    def of_chats(self, setting: Setting) -> CausalLM:
        """Return the task for chats, unless a template of pairs formats the prompts."""
        template = prompt_template(self.template, setting.tokenizer)
        if self.data == "pairs" and template is not None:
            return self
        return replace(self, data="chat") if setting.tokenizer.chat_template else self

    def shown(self, example: Any) -> list[str]:
        """Return the prompt or the last message."""
        return [example.messages[-1][1] if isinstance(example, Chat) else example.text]

    def group_of(self, example: Any) -> Hashable:
        """Return the prompt or text; for a chat, its first messages."""
        return opening(example.messages) if isinstance(example, Chat) else example.text

    def pools(self, examples: Sequence[Any]) -> dict[str, list[Shot]]:
        """Return the distinct prompts and responses; only of chats with one of each."""
        pairs = (_question_and_answer(each) for each in examples)
        return {"": [*dict.fromkeys(pair for pair in pairs if pair)]}

    # Rows

    def encode(self, examples: Sequence[Any], setting: Setting, *, labelled: bool) -> Encoded:
        """Encode prompt and response as one row; without `labelled` only the prompt."""
        if not labelled:
            return self._prompts(examples, setting)
        encoded = super().encode(examples, setting, labelled=labelled)
        if not self.pack:
            return encoded
        return replace(encoded, rows=_pack(encoded.rows, limit_of(setting)), owners=())

    def rows_of(self, example: Any, setting: Setting, *, labelled: bool) -> list[Row]:
        """Return the row of a prompt and its response, or the rows of a raw text."""
        tokens = self._tokens(example, setting.tokenizer)
        limit = self._limit(example, tokens, setting)
        whole = self.data != "text"
        parts = [_fitted(tokens, limit)] if whole else _chunks(tokens, limit)
        return [_row(part) for part in parts if len(part) > 1]

    def frame(self, setting: Setting) -> Frame:
        """Return the tokens that begin and end a document."""
        begin, _ = around_text(setting.tokenizer)
        return Frame(begin, tuple(text_stops(setting.tokenizer)))

    def window_row(self, ids: list[int], starts: list[int], frame: Frame) -> Row:
        """Return a window with all tokens but the first as labels."""
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}

    def unlimited(self) -> CausalLM:
        """Return the task without packing."""
        return replace(self, pack=False)

    def _prompts(self, examples: Sequence[Any], setting: Setting) -> Encoded:
        """Encode prompts, cut from the left so that `new_tokens` more positions are free.

        If there are fewer positions than that, half of them are for the prompt.
        """
        free = setting.positions - self.new_tokens
        free = free if free > 0 else setting.positions // 2
        rows = []
        for example in examples:
            tokens = self._tokens(example, setting.tokenizer, prompt=True)
            room = max(min(self._limit(example, tokens, setting, prompt=True), free), 1)
            ids = [i for i, _ in tokens][-room:]
            rows.append({"input_ids": ids, "attention_mask": [1] * len(ids)})
        return Encoded(self, setting, tuple(examples), rows, tuple(range(len(rows))))

    def _limit(
        self, example: Any, tokens: Tokens, setting: Setting, *, prompt: bool = False
    ) -> int:
        """Return the maximum tokens of a row; few-shot examples do not count as input length."""
        if not self.examples:
            return limit_of(setting)
        alone = replace(self, examples=())._tokens(example, setting.tokenizer, prompt=prompt)
        return shot_limit(setting, len(tokens) - len(alone))

    def fits(self, row: Row, setting: Setting) -> bool:
        """Return False with few-shot examples, which do not count as input length."""
        return not self.examples and super().fits(row, setting)

    def _tokens(
        self, example: Any, tokenizer: PreTrainedTokenizerBase, *, prompt: bool = False
    ) -> Tokens:
        """Tokenize an example; with `prompt` only up to the (last) response."""
        arguments = self._arguments()
        template = prompt_template(self.template, tokenizer)
        if isinstance(example, Chat) or (self.data == "pairs" and template is None):
            messages = _messages(example)
            shots = self.shots_before(_last_question(messages)) if self.examples else ()
            turns = [turn for text, answer in shots for turn in _read_turns(text, answer)]
            chat = behind_turns(with_arguments(messages, arguments), turns)
            return _chat_tokens(chat, tokenizer, prompt)
        if self.data == "text":
            ids = _start(example.text, tokenizer)
            closed = ids if prompt or not example.text.strip() else ended(ids, tokenizer)
            return [(i, True) for i in closed]
        before = "".join(
            str(template).replace("{text}", text) + answer + SEPARATOR
            for text, answer in self.shots_before(example.text)
        )
        filled = before + str(template).replace("{text}", example.text)
        tokens = [(i, False) for i in _start(filled, tokenizer)]
        if not prompt:
            response = tokenizer(str(example.label), add_special_tokens=False)["input_ids"]
            tokens += [(i, True) for i in ended(response, tokenizer)]
        return tokens

    def remarks(self, data: Encoded) -> tuple[str, ...]:
        """List the keys and columns that the chat template ignores; warn if no answer ends."""
        chats = [example for example in data.examples if isinstance(example, Chat)]
        return (*unused_note(chats, data.setting.tokenizer), *self.endless_note(data.setting))

    def endless_note(self, setting: Setting) -> tuple[str, ...]:
        """Add no note for raw text, which has no end."""
        return () if self.data == "text" else super().endless_note(setting)

    def stops(self, setting: Setting) -> list[int]:
        """Return the token that the chat template or the tokenizer appends to a response."""
        template = prompt_template(self.template, setting.tokenizer)
        if self.data == "chat" or (self.data == "pairs" and template is None):
            return template_stops(setting.tokenizer)
        return text_stops(setting.tokenizer)

    def stop_texts(self, setting: Setting) -> tuple[str, ...]:
        """Return the separator of few-shot examples, so that an untrained model stops there."""
        plain = self.data == "pairs" and prompt_template(self.template, setting.tokenizer)
        inside = any(SEPARATOR in answer for _, answer in self.examples)
        return (SEPARATOR,) if plain and self.examples and not inside else ()

    def padding_side(self, setting: Setting) -> str:
        """Return the right side: no token attends to padding there."""
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
        """Compute exact_match of the parts that the option `answer` matches in both texts."""
        expected = [e.messages[-1][1] if isinstance(e, Chat) else str(e.label) for e in examples]
        generated = [p.text for p in predictions if isinstance(p, Generated)]
        answers = ([self._answer(text) for text in texts] for texts in (expected, generated))
        return generation_metrics("exact", *answers)

    def _answer(self, text: str) -> str:
        try:
            # The pattern may come from a downloaded adapter, and some patterns never finish.
            match = regex.search(self.answer, text, timeout=2) if self.answer else None
        except TimeoutError as error:
            raise ConfigError(
                f"answer takes too long to match {text[:80]!r}", hint="avoid nested repetitions"
            ) from error
        return match.group(1) if match else text

    @property
    def evaluates_predictions(self) -> bool:
        """The option `generate`."""
        return self.generate

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
            *before, last = example.messages
            return ["\n".join(f"{message[0]}: {message[1]}" for message in before), last[1]]
        return [example.text, str(example.label or "")]


def _messages(example: Any) -> tuple[Message, ...]:
    """Return the messages of a chat, or of a prompt and its response."""
    if isinstance(example, Chat):
        return example.messages
    return (("user", example.text), ("assistant", str(example.label or "")))


def _last_question(messages: Sequence[Message]) -> str:
    return next((m[1] for m in reversed(messages) if m[0] == "user"), "")


def _read_turns(text: str, answer: str) -> tuple[Message, Message]:
    return ("user", text), as_read(("assistant", answer))


def _question_and_answer(example: Any) -> Shot | None:
    """Return a prompt and its response, or the two messages of a chat after its instructions."""
    messages = [message for message in _messages(example) if message[0] != "system"]
    if [message[0] for message in messages] != ["user", "assistant"]:
        return None
    return messages[0][1], messages[1][1]


def prompt_template(template: str | None, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the template of prompts; None means the tokenizer's chat template."""
    if template != AUTO:
        return template
    return None if tokenizer.chat_template else PLAIN


def chosen_template(template: str | None, model: PreTrainedModel) -> str | None:
    """Return the template of prompts that the tokenizer of a backbone chooses.

    The template is recorded with an adapter: another tokenizer would format prompts differently.
    """
    from adapterhub.anatomy.backbone import Backbone

    snapshot = Backbone.of(model).tokenizer
    return prompt_template(template, snapshot.tokenizer) if snapshot else template


def template_note(task: str) -> str:
    """Return the line that describes the format of prompts."""
    return (
        "prompts and responses are written by the tokenizer's chat template; --task "
        f"\"{task}(template='{{text}}\\n')\" leaves it out"
    )


def _start(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenize a text with the special tokens at its start, once, but not at its end."""
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]  # long ones are cut
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids = ids[1:]  # a template may add it, too
    return without_end(ids, tokenizer)


def _chat_tokens(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, prompt: bool
) -> Tokens:
    """Tokenize a chat by the tokenizer's template; the assistant's messages are labels.

    The whole chat is tokenized as one text.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template",
            expected="a backbone trained on chats",
            hint="pairs with a template: --task \"causal-lm(template='{text}')\"",
        )
    if prompt and messages[-1][0] == "assistant":
        messages = messages[:-1]
    turns, text = fitted_chat(tokenizer, turns_of(messages), generation_prompt=prompt)
    if prompt:
        return _tokens_of(text, [], tokenizer)
    render = _renderer(tokenizer)
    marked = marked_spans(tokenizer, turns)
    if marked is not None:
        if not all(is_learned(m) for m in messages if m[0] == "assistant"):
            marked = _of_learned(marked, messages, answer_spans(render, turns, text))
        return _tokens_of(text, marked, tokenizer, whole=True)
    answers = [n for n, turn in enumerate(turns) if turn["role"] == "assistant"]
    empty = any(not turns[n].get("content") for n in answers)
    unused = {"role", "content", ARGUMENTS, *(unused_keys(render, turns, text) if empty else ())}
    learned = [
        span
        for n, span in zip(answers, answer_spans(render, turns, text), strict=True)
        # A template that ignores tool calls omits an answer without text.
        if is_learned(messages[n]) and (turns[n].get("content") or turns[n].keys() - unused)
    ]
    return _tokens_of(text, learned, tokenizer)


def _of_learned(
    marked: Sequence[Span], messages: Sequence[Message], answers: Sequence[Span]
) -> list[Span]:
    """Return the spans that a template marks, without parts of answers that are not learned."""
    own = [message for message in messages if message[0] == "assistant"]
    left = [span for m, span in zip(own, answers, strict=True) if not is_learned(m)]
    return [m for m in marked if not any(m[0] < end and begin < m[1] for begin, end in left)]


def _renderer(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[Any], bool], str]:
    return lambda turns, begun: chat_text(tokenizer, turns, generation_prompt=begun)


def _tokens_of(
    text: str, learned: Sequence[Span], tokenizer: PreTrainedTokenizerBase, *, whole: bool = False
) -> Tokens:
    """Tokenize a text with learned parts: a token is learned if it begins in one.

    With `whole`, it is also learned if it ends in one, as transformers reads template marks.
    """
    if not tokenizer.is_fast:
        # Without character offsets, each part is tokenized on its own.
        cuts = [0, *(place for span in learned for place in span), len(text)]
        return [
            (i, bool(number % 2))
            for number, (begin, end) in enumerate(pairwise(cuts))
            for i in tokenizer(text[begin:end], add_special_tokens=False)["input_ids"]
        ]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    begins = [begin for begin, _ in learned]
    labels = []
    for begin, end in encoded["offset_mapping"]:
        number = bisect_right(begins, max(end - 1, begin) if whole else begin) - 1
        labels.append(number >= 0 and begin < learned[number][1])
    return list(zip(encoded["input_ids"], labels, strict=True))


def unused_note(chats: Iterable[Chat], tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return a line that lists the message keys that have no effect, if there are any."""
    counts: Counter[str] = Counter()
    for chat in chats:
        if any(len(message) > 2 for message in chat.messages):
            turns, text = fitted_chat(tokenizer, turns_of(chat.messages), generation_prompt=False)
            counts += unused_keys(_renderer(tokenizer), turns, text)
    named = ", ".join(f"{one_line(key)!r} ({count:,})" for key, count in counts.most_common())
    return (f"keys and columns that the chat template does not use: {named}",) if named else ()


def _chat_builder(column: str, beside: Mapping[str, str], labelled: bool) -> Callable[..., Chat]:
    def build(value: Any, *others: Any) -> Chat:
        messages = messages_of(value)
        if messages is None:
            raise ValueError(
                f"{column!r} is not a list of messages {{role: ..., content: ...}} with texts"
            )
        chat = Chat(with_beside(messages, beside, others))
        last = chat.messages[-1][0]
        refuse("the last message is not the assistant's" * (labelled and last != "assistant"))
        refuse(*(_message_problem(message, labelled) for message in messages))
        return chat

    return build


def _message_problem(message: Message, labelled: bool) -> str:
    """Describe the error in a message; a system message may be empty."""
    allowed = not labelled or may_be_empty(message)
    return text_problem(message[1], message[0], allow_empty=allowed) or weight_problem(message)


def _fitted(tokens: Tokens, limit: int) -> Tokens:
    """Cut tokens to `limit`, first from the start of the prompt, then from the end."""
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

    Positions restart with each example, so the backbone separates them without an attention mask.
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

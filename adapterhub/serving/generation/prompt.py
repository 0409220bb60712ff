"""Prompts for generation: a text, or a chat formatted as in the adapter's training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adapterhub.data.chat_formats import ARGUMENTS, messages_of
from adapterhub.errors import ConfigError, DataError
from adapterhub.inference.inputs import empty_error, empty_inputs, refuse_half_characters
from adapterhub.inference.open import Predictor
from adapterhub.serving.generation.request import GenerationOptions
from adapterhub.serving.shared_backbone import ServedAdapter
from adapterhub.tasks import Setting
from adapterhub.tasks.common.batches import Row
from adapterhub.tasks.common.language_models import Generation, Writing
from adapterhub.tasks.common.languages import LANGUAGE_COLUMNS, LanguageError

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, its tokens, or the messages of a chat."""
_MOST_TOKENS = 256  # of a text, by default


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as tokens.

    Attributes:
        row: the row of the task that a model reads.
        limit: the most tokens to generate.
        ends: the tokens that end the text.
        continues: whether the text continues the tokens of the row.
        start: the options of `generate` that choose the first token of the text.
        stops: the stop texts that end it.
    """

    row: Row
    limit: int
    ends: frozenset[int]
    continues: bool
    start: Mapping[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()

    @property
    def ids(self) -> list[int]:
        """The tokens of the row."""
        return list(self.row["input_ids"])


def encode_prompt(
    prompt: Prompt, served: ServedAdapter, options: GenerationOptions
) -> EncodedPrompt:
    """Encode a prompt for an adapter.

    Raises:
        ConfigError: the adapter does not generate texts, takes no chats, or lacks the languages.
        DataError: the prompt has another form, or leaves no room for a text.
    """
    refuse_half_characters(prompt)
    predictor = served.predictor
    task: Any = predictor.task
    predictor.writing(Writing())  # raises if the model cannot generate
    setting = predictor.setting.unlimited
    languages = options.src_lang, options.tgt_lang
    task = task.between(languages) if any(languages) else task
    task, example = _example(prompt, task, predictor, setting)
    try:
        row = _row(example, task, served, setting)
    except LanguageError as error:
        hint = f"{' and '.join(LANGUAGE_COLUMNS)} beside the prompt"
        raise ConfigError(error.problem, expected=error.expected, hint=hint) from error
    if row.keys() - {"input_ids", "attention_mask"}:
        raise ConfigError(
            f"{task.name} reads more than a text", expected="engine.submit(...) for such inputs"
        )
    continues = not predictor.model.config.is_encoder_decoder
    if options.prompt_logprobs is not None and not continues:
        raise ConfigError(
            "probabilities of the prompt, which an encoder-decoder does not predict",
            expected="an adapter of a decoder, or a request without echo and prompt_logprobs",
        )
    limit = options.max_tokens
    if limit is None:
        limit = _recorded_limit(task, bare=not served.digest)
    room = _room(predictor, served, len(row["input_ids"]), continues, least=min(limit, 1))
    ends = frozenset((*served.ends, *task.stops(setting)))
    start = task.start_options(predictor.model, setting)
    stops = task.stop_texts(setting)
    return EncodedPrompt(row, min(limit, room), ends, continues, start, stops)


def _row(example: Any, task: Any, served: ServedAdapter, setting: Setting) -> Row:
    """Return the row of an example; a prompt of tokens is used unchanged.

    Raises:
        DataError: it has no tokens, or tokens that the backbone lacks.
    """
    predictor = served.predictor
    if not isinstance(example, list):
        if empty_inputs(task, [example], predictor.setting):
            raise empty_error([0], ["the prompt"], 1)
        row: Row = task.encode([example], setting, labelled=False).rows[0]
        return row
    vocabulary = predictor.model.config.get_text_config().vocab_size
    if served.alone:  # it may have new tokens, which are in the model while it is active
        vocabulary = max(vocabulary, len(predictor.tokenizer))
    if wrong := [each for each in example if not 0 <= each < vocabulary]:
        raise DataError(
            f"the prompt has the token {wrong[0]}",
            expected=f"tokens of the backbone, from 0 to {vocabulary - 1:,}",
            hint="a text",
        )
    return {"input_ids": example, "attention_mask": [1] * len(example)}


def _example(prompt: Prompt, task: Any, predictor: Predictor, setting: Setting) -> tuple[Any, Any]:
    """Return the task that reads a prompt, and its example; tokens are their own example."""
    if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
        return task.of_texts(), list(prompt)
    if isinstance(prompt, str):
        task = task.of_texts()
        return task, task.example((prompt,), predictor.data)
    messages = messages_of(prompt)
    if messages is None:
        raise DataError(
            f"a prompt of the type {type(prompt).__name__}",
            expected="a text, or a list of messages, {role: ..., content: ...}",
        )
    task = task.of_chats(setting)
    if (chat := task.chat_example(messages)) is not None:
        return task, chat
    if any(isinstance(each, Mapping) and ARGUMENTS in each for each in prompt):
        raise ConfigError(
            f"{ARGUMENTS}, and no chat template writes the prompts of this adapter",
            expected=f"a request without {ARGUMENTS}",
        )
    if len(messages) == 1 and messages[0][0] == "user":
        return task, task.example((messages[0][1],), predictor.data)
    raise ConfigError(
        f"a chat of {len(messages)} messages, and the prompts of this adapter are single texts",
        expected="one message of the role user, or a text",
    )


def _recorded_limit(task: Generation, bare: bool) -> int:
    """Return the text limit recorded in training, if it differs from the default."""
    usual = type(task)().new_tokens
    return _MOST_TOKENS if bare or task.new_tokens == usual else task.new_tokens


def _room(
    predictor: Predictor, served: ServedAdapter, tokens: int, continues: bool, least: int
) -> int:
    """Return the number of tokens that fit after a prompt, at least `least`."""
    positions = predictor.setting.positions
    room = positions - tokens if continues else positions
    if room < least or tokens > positions:
        virtual = f", {served.virtual:,} of them for virtual tokens" if served.virtual else ""
        raise DataError(
            f"the prompt has {tokens:,} tokens",
            expected=f"fewer than {positions:,}: the model has {positions + served.virtual:,} "
            f"positions{virtual}",
            hint="a shorter prompt",
        )
    return room

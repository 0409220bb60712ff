"""Comparisons read from tables: a prompt with a chosen and a rejected response.

Prompts and responses are texts; or lists of messages, as in chats. A list of messages with the
whole chat has the prompt in front of its last message, and needs no column with the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from adapterhub.data.chat_formats import Message, is_learned, may_be_empty, messages_of
from adapterhub.data.column_names import PROMPTS, plain_name
from adapterhub.data.columns import WANTS, ColumnChoice, choose_columns
from adapterhub.data.examples import read_rows, refuse, text_problem
from adapterhub.data.options import DataOptions
from adapterhub.data.tables import read_table

Messages = tuple[Message, ...]
"""Messages of a chat."""


@dataclass(frozen=True)
class Comparison:
    """A prompt, a text or messages, with a response that is preferred to another one."""

    prompt: str | Messages
    chosen: str = ""
    rejected: str = ""

    @property
    def text(self) -> str:
        """The prompt as one text."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{message[0]}: {message[1]}" for message in self.prompt)


def comparison_columns(
    source: str, options: DataOptions, split: str, *, labelled: bool = True
) -> ColumnChoice:
    """Choose the columns of comparisons: the prompt may be a part of the chosen chat.

    Raises:
        DataError: the source cannot be read, or its columns are in doubt.
    """
    table = read_table(source, options, split)
    prompts = {name for tier in PROMPTS for name in tier}
    has_prompt = options.text is not None or any(plain_name(c) in prompts for c in table.columns)
    if has_prompt:
        return choose_columns(source, options, split, WANTS["comparisons"], labelled=labelled)
    wants = {name: kind for name, kind in WANTS["comparisons"].items() if name != "text"}
    choice = choose_columns(source, options, split, wants)
    return replace(choice, options=replace(choice.options, text=choice.options.label))


def read_comparisons(
    source: str, options: DataOptions, split: str, *, labelled: bool = True, chosen: bool = False
) -> list[Comparison]:
    """Read comparisons, without labels the prompts alone, or with the `chosen` responses.

    Raises:
        DataError: the source cannot be read, its columns are in doubt, or rows are invalid.
    """
    options = comparison_columns(source, options, split, labelled=labelled).options
    columns = [options.text_column]
    columns += [options.label_column] if labelled or chosen else []
    columns += [str(options.pair)] if labelled else []

    def build(prompt: Any, *responses: Any) -> Comparison:
        comparison = _comparison(prompt, *responses)
        named = zip(
            (comparison.text, comparison.chosen, comparison.rejected), columns, strict=False
        )
        refuse(*(text_problem(text, name, allow_empty=not labelled) for text, name in named))
        return comparison

    return read_rows(source, options, split, columns, build)


def _comparison(prompt: Any, *responses: Any) -> Comparison:
    """Build a comparison of texts or of lists of messages.

    Raises:
        ValueError: the chats do not have the same prompt, or end with no response.
    """
    chats = [messages_of(value) for value in responses]
    if not chats or not all(chats):
        parts = [value if isinstance(value, str) else None for value in (prompt, *responses)]
        return Comparison(messages_of(prompt) or parts[0], *parts[1:])  # type: ignore[arg-type]
    before = messages_of(prompt) or ()
    if isinstance(prompt, str):
        before = (("user", prompt),)
    starts = {chat[:-1] for chat in chats if chat}
    if len(starts) > 1:
        raise ValueError("the chosen and the rejected chat differ before their last messages")
    (start,) = starts or {before}
    last = [chat[-1] for chat in chats if chat]
    if any(message[0] != "assistant" for message in last):
        raise ValueError("the last message is not the assistant's")
    if any(may_be_empty(message) or not is_learned(message) for message in last):
        raise ValueError("a response has calls of tools or other keys: expected a text to compare")
    return Comparison(start or before, *(message[1] for message in last))


def are_chats(source: str, options: DataOptions, split: str) -> bool:
    """Return whether the prompts are lists of messages.

    Raises:
        DataError: the source cannot be read, or its columns are in doubt.
    """
    choice = comparison_columns(source, options, split)
    table = choice.table
    assert table is not None
    columns = {choice.options.text, choice.options.label} & {*table.columns}
    return any(isinstance(v, list) for c in columns for v in table.spread(str(c), 5))

"""Texts that belong together, read from tables: in pairs, with negatives or scores, or compared.

A comparison is a prompt with a chosen and a rejected response. They are texts; or lists of
messages, as in chats. A list of messages with the whole chat has the prompt in front of its last
message, and needs no column with the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from adapterhub.data import column_names as names
from adapterhub.data.chat_formats import Message, is_learned, may_be_empty, messages_of
from adapterhub.data.column_names import plain_name
from adapterhub.data.columns import WANTS, ColumnChoice, choose_columns
from adapterhub.data.examples import parse_label, read_rows, refuse, text_problem
from adapterhub.data.options import DataOptions
from adapterhub.data.tables import read_table


@dataclass(frozen=True)
class TextPair:
    """A text, the one that belongs to it, texts that do not, and the score of the pair."""

    text: str
    pair: str | None = None
    negatives: tuple[str, ...] = ()
    label: float | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts: of the pair, and the negatives."""
        partner = () if self.pair is None else (self.pair,)
        return (self.text, *partner, *self.negatives)


def has_scores(source: str, options: DataOptions, split: str) -> bool:
    """Return whether pairs have scores: a column is chosen or named so, and there is no negative.

    Raises:
        DataError: the source cannot be read.
    """
    if options.label is not None:
        return True
    columns = read_table(source, options, split).columns
    scores = {name for tier in names.NUMBERS for name in tier}
    named = {plain_name(column) for column in columns}
    return bool(scores & named) and not _negatives(columns, options) and "positive" not in named


def pair_columns(
    source: str, options: DataOptions, split: str, *, scored: bool, labelled: bool = True
) -> ColumnChoice:
    """Choose the columns of pairs, `scored` or with negatives; unlabelled, of first texts alone.

    Raises:
        DataError: the source cannot be read, or its columns are in doubt.
    """
    wants = WANTS["scored pairs" if scored else "pairs"]
    return choose_columns(source, options, split, wants if labelled else {"text": "anchor"})


def read_text_pairs(
    source: str, options: DataOptions, split: str, *, scored: bool, labelled: bool = True
) -> list[TextPair]:
    """Read pairs, `scored` or with negatives; unlabelled, the first texts alone.

    Raises:
        DataError: the source cannot be read, its columns are in doubt, or rows are invalid.
    """
    choice = pair_columns(source, options, split, scored=scored, labelled=labelled)
    table, options = choice.table, choice.options
    assert table is not None
    others = [] if scored or not labelled else _negatives(table.columns, options)
    columns = [options.text_column, *[str(options.pair)] * labelled]
    columns += [options.label_column] * (scored and labelled)

    def build(*values: Any) -> TextPair:
        texts, rest = values[: 1 + labelled], values[1 + labelled :]
        label, problem = None, ""
        if scored and labelled:
            label, problem = parse_label(rest[0], True, table.decimal_comma)
        negatives = _flat(values[len(columns) :])
        named = zip(texts, columns, strict=False)
        problems = [text_problem(text, name, allow_empty=not labelled) for text, name in named]
        problems += [text_problem(text, "negatives", allow_empty=False) for text in negatives]
        refuse(*problems, problem)
        pair = texts[1] if labelled else None
        return TextPair(texts[0], pair, tuple(negatives), None if label is None else float(label))

    return read_rows(source, options, split, [*columns, *others], build)


def _flat(cells: Sequence[Any]) -> list[Any]:
    """Return the texts of cells: each is a text or a list of texts; missing ones are left out."""
    lists = [cell if isinstance(cell, list) else [cell] for cell in cells if cell is not None]
    return [text for each in lists for text in each]


def _negatives(columns: Sequence[str], options: DataOptions) -> list[str]:
    """Return the columns with negatives: those that the options name, or that are called so."""
    if options.negatives is not None:
        return [options.negatives] if isinstance(options.negatives, str) else [*options.negatives]
    return [c for c in columns if re.fullmatch(names.NEGATIVE, plain_name(c))]


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
    prompts = {name for tier in names.PROMPTS for name in tier}
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

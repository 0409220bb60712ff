"""Read related texts from tables: pairs with negatives or scores, and comparisons.

A comparison is a prompt with a chosen and a rejected response, as texts or as lists of messages.
Responses that begin with the prompt do not need a prompt column: lists of messages of the whole
chat, and texts of dialogues, which are split after the last answer mark that both share
(`adapterhub.data.dialogues`).

Rated responses are rows of one response each, with a mark: liked or disliked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from adapterhub.data import column_names as names
from adapterhub.data.chat_formats import (
    instruction_template,
    is_learned,
    may_be_empty,
    messages_of,
)
from adapterhub.data.columns import WANTS, ColumnChoice, Wants, choose_columns, described_columns
from adapterhub.data.dialogues import Dialogue, Messages, begins_with, behind, dialogue_of
from adapterhub.data.examples import Grouped, parse_label, read_rows, refuse, text_problem
from adapterhub.data.options import DataOptions
from adapterhub.data.table import Table, plain_name
from adapterhub.data.tables import keep_table, read_table


@dataclass(frozen=True)
class TextPair(Grouped):
    """A text, its positive, its negatives, and the score of the pair."""

    text: str
    pair: str | None = None
    negatives: tuple[str, ...] = ()
    label: float | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts: the pair and the negatives."""
        partner = () if self.pair is None else (self.pair,)
        return (self.text, *partner, *self.negatives)


def has_scores(source: str, options: DataOptions, split: str) -> bool:
    """Return whether pairs have scores: a column is set or named so, without negatives.

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
    """Infer the columns of pairs, `scored` or with negatives; if unlabelled, only of first texts.

    Raises:
        DataError: the source cannot be read, or its columns are ambiguous.
    """
    kinds = WANTS["scored pairs" if scored else "pairs"]
    return choose_columns(source, options, split, kinds if labelled else {"text": "anchor"})


def read_text_pairs(
    source: str, options: DataOptions, split: str, *, scored: bool, labelled: bool = True
) -> list[TextPair]:
    """Read pairs, `scored` or with negatives; if unlabelled, only the first texts.

    Raises:
        DataError: the source cannot be read, its columns are ambiguous, or rows are invalid.
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
    """Return the texts of cells, each a text or a list of texts; missing ones are dropped."""
    lists = [cell if isinstance(cell, list) else [cell] for cell in cells if cell is not None]
    return [text for each in lists for text in each]


def _negatives(columns: Sequence[str], options: DataOptions) -> list[str]:
    """Return the columns with negatives, as set by the options or by their usual names."""
    if options.negatives is not None:
        return [options.negatives] if isinstance(options.negatives, str) else [*options.negatives]
    return [c for c in columns if re.fullmatch(names.NEGATIVE, plain_name(c))]


@dataclass(frozen=True)
class Comparison(Grouped):
    """A prompt (text or messages), with a response that is preferred to another.

    A rated response is `chosen` if it is liked and `rejected` if it is not; the other one is "".
    `written` is the original text if the prompt was a text in the data.
    """

    prompt: str | Messages
    chosen: str = ""
    rejected: str = ""
    written: str = field(default="", compare=False)

    @property
    def liked(self) -> bool:
        """Whether a rated response is a good one."""
        return bool(self.chosen)

    @property
    def text(self) -> str:
        """The prompt as one text."""
        if isinstance(self.prompt, str):
            return self.prompt
        lines = (f"{message[0]}: {message[1]}" for message in self.prompt or ())
        return self.written or "\n".join(lines)


def comparison_columns(
    source: str, options: DataOptions, split: str, *, labelled: bool = True, rated: bool = False
) -> ColumnChoice:
    """Infer the columns of comparisons, or of `rated` responses.

    The column of the chosen or only response may also hold the prompt.

    Raises:
        DataError: the source cannot be read, or its columns are ambiguous.
    """
    kinds = WANTS["rated responses" if rated else "comparisons"]
    if options.text is None and (labelled or _responses(source, options, split, kinds)):
        responses = {name: kind for name, kind in kinds.items() if name != "text"}
        choice = choose_columns(source, options, split, responses)
        table = choice.table
        assert table is not None
        in_front = _has_prompts(table, choice.options, rated)
        template = None if in_front else instruction_template(table.columns)
        if in_front or template:
            read = replace(choice.options, text=template or choice.options.label)
            keep_table(table, source, read, split)
            notes = (*choice.notes, *[f"prompts from {template!r}"] * bool(template))
            return replace(choice, options=read, notes=notes)
    return choose_columns(source, options, split, kinds, labelled=labelled)


def _responses(source: str, options: DataOptions, split: str, wants: Wants) -> bool:
    """Return whether a table has columns with the names of the responses."""
    columns = {plain_name(column) for column in read_table(source, options, split).columns}
    return all(columns & {*described_columns(wants)[name][1]} for name in ("label", "pair"))


def has_comparisons(source: str, options: DataOptions, split: str) -> bool:
    """Return whether a table has a chosen and a rejected response in each row.

    Raises:
        DataError: the source cannot be read.
    """
    return _responses(source, options, split, WANTS["comparisons"])


def _has_prompts(table: Table, options: DataOptions, rated: bool) -> bool:
    """Return whether the responses of a table begin with their prompts.

    With a prompt column, prompts are read from it, although chats may begin with them, too.
    """
    if _dialogue_of(table, options, rated) is not None:
        return True
    prompts = {name for tier in names.ASKINGS for name in tier}
    others = {plain_name(c) for c in table.columns if c not in (options.label, options.pair)}
    return not prompts & others and any(
        len(messages_of(value) or ()) > 1
        for column in _response_columns(options, rated)
        for value in table.spread(column, 5)
    )


def _response_columns(options: DataOptions, rated: bool) -> list[str]:
    """Return the columns that hold responses."""
    return [str(options.label)] if rated else [str(options.label), str(options.pair)]


def _dialogue_of(table: Table, options: DataOptions, rated: bool) -> Dialogue | None:
    """Return the turn marks of a table's responses; None if they are not dialogues."""
    columns = [*_response_columns(options, rated), str(options.label)][:2]
    if not {*columns} <= {*table.columns}:
        return None
    pairs = zip(*(table.spread(column, 200) for column in columns), strict=False)
    return dialogue_of([(one, two) for one, two in pairs if one is not None and two is not None])


def read_comparisons(
    source: str,
    options: DataOptions,
    split: str,
    *,
    labelled: bool = True,
    chosen: bool = False,
    rated: bool = False,
) -> list[Comparison]:
    """Read comparisons, or `rated` responses.

    Without labels, only the prompts are read, or also the `chosen` responses.

    Raises:
        DataError: the source cannot be read, its columns are ambiguous, or rows are invalid.
    """
    choice = comparison_columns(source, options, split, labelled=labelled, rated=rated)
    table, options = choice.table, choice.options
    assert table is not None
    in_front = options.text == options.label
    dialogue = _dialogue_of(table, options, rated)
    columns = [options.text_column]
    columns += [options.label_column] if labelled or chosen else []
    columns += [str(options.pair)] if labelled else []
    repeated = not in_front and labelled and _repeat_prompts(table, columns[: 2 if rated else 3])
    systems = [c for c in table.columns if plain_name(c) in names.SYSTEMS and c not in columns]

    def build(prompt: Any, *values: Any) -> Comparison:
        responses, system = values[: len(columns) - 1], [*values[len(columns) - 1 :], None][0]
        marks, responses = responses[1 if rated else 2 :], responses[: 1 if rated else 2]
        if repeated and isinstance(prompt, str):
            responses = tuple(behind(prompt, response) for response in responses)
        if dialogue and in_front and isinstance(prompt, str):
            comparison = _divided(dialogue, prompt, responses)
        else:
            comparison = _comparison(prompt, *responses)
        comparison = _with_system(comparison, system)
        named = zip(
            (comparison.text, comparison.chosen, comparison.rejected), columns, strict=False
        )
        read = [pair for pair in named if not (rated and pair[1] == options.pair)]
        refuse(*(text_problem(text, name, allow_empty=not labelled) for text, name in read))
        if marks and not _is_liked(marks[0]):
            return replace(comparison, chosen="", rejected=comparison.chosen)
        return comparison

    return read_rows(source, options, split, [*columns, *systems[:1]], build)


_MARKS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _is_liked(mark: Any) -> bool:
    """Return the meaning of a mark: true, 1 or yes, or false, 0 or no.

    Raises:
        ValueError: it is none of these.
    """
    plain = str(mark).strip().lower().removesuffix(".0")
    if plain not in _MARKS:
        raise ValueError(f"the mark {mark!r} is not true or false")
    return _MARKS[plain]


def _repeat_prompts(table: Table, columns: Sequence[str]) -> bool:
    """Return whether both responses of each row begin with its prompt."""
    cells = [table.column(name) if name in table.columns else () for name in columns]
    rows = list(zip(*cells, strict=False))
    return bool(rows) and all(
        isinstance(prompt, str) and all(begins_with(prompt, response) for response in responses)
        for prompt, *responses in rows
    )


def _divided(dialogue: Dialogue, prompt: str, responses: Sequence[Any]) -> Comparison:
    """Build a comparison from dialogues; without responses, from the beginning of one.

    Raises:
        ValueError: the dialogues do not share a turn, or continue after the answer.
    """
    refuse(*(text_problem(each, "response", allow_empty=False) for each in responses))
    front, answers = dialogue.divided(list(responses) or [prompt])
    if not responses:
        answers = []
    return replace(Comparison(dialogue.messages(front), *answers), written=front)


def _with_system(comparison: Comparison, system: Any) -> Comparison:
    """Prepend the system message of a row to its prompt, unless it has one.

    Raises:
        ValueError: the system message is not a text.
    """
    if system is None or system == "":
        return comparison
    if not isinstance(system, str):
        raise ValueError("the system message is not text")
    prompt, written = comparison.prompt, comparison.written
    messages: Messages = (("user", prompt),) if isinstance(prompt, str) else prompt
    if messages and messages[0][0] == "system":
        return comparison
    written = prompt if isinstance(prompt, str) else written
    text = f"{system}\n\n{written}" if written else ""
    return replace(comparison, prompt=(("system", system), *messages), written=text)


def _comparison(prompt: Any, *responses: Any) -> Comparison:
    """Build a comparison from texts or lists of messages.

    Raises:
        ValueError: the chats have different prompts, or do not end with a response.
    """
    chats = [messages_of([value] if isinstance(value, Mapping) else value) for value in responses]
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
    if start and before[-len(start) :] == start:  # with a system message in front
        start = before
    last = [chat[-1] for chat in chats if chat]
    if any(message[0] != "assistant" for message in last):
        raise ValueError("the last message is not the assistant's")
    if any(may_be_empty(message) or not is_learned(message) for message in last):
        raise ValueError("a response has calls of tools or other keys: expected a text to compare")
    return Comparison(start or before, *(message[1] for message in last))


def are_chats(source: str, options: DataOptions, split: str, *, rated: bool = False) -> bool:
    """Return whether the prompts or the responses are messages.

    Raises:
        DataError: the source cannot be read, or its columns are ambiguous.
    """
    choice = comparison_columns(source, options, split, rated=rated)
    table = choice.table
    assert table is not None
    columns = {choice.options.text, choice.options.label} & {*table.columns}
    return any(isinstance(v, list | Mapping) for c in columns for v in table.spread(str(c), 5))

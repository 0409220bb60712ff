"""Recognize data of instructions and chats by its columns, as other libraries publish it.

Alpaca               instruction, input (may be empty), output
prompt, completion   one prompt and its completion (also: response)
OpenAI               messages, each {role: ..., content: ...}
ShareGPT             conversations, each message {from: human, value: ...}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from adapterhub.data.columns import ColumnChoice, choose_columns
from adapterhub.data.options import DataOptions
from adapterhub.data.table import Table
from adapterhub.data.tables import read_table
from adapterhub.errors import one_line

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
}
CHAT_COLUMNS = ("messages", "conversations", "conversation")
_UNREAD = ("system", "history", "tools", "images")
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("instruction", "output"),
          ("instruction", "response"))  # fmt: skip


@dataclass(frozen=True)
class ChatFormat:
    """A format that was recognized: its name, and the columns with the text and the target.

    `label` is None for chats, whose last message is the target. `unread` are columns that other
    trainers read in these formats.
    """

    name: str
    text: str
    label: str | None
    unread: tuple[str, ...] = ()


def recognize_format(table: Table) -> ChatFormat | None:
    """Return the format of instructions or chats that a table has beyond doubt, or None."""
    columns = {name.lower(): name for name in table.columns}
    found = _format_of(table, columns)
    unread = tuple(columns[name] for name in _UNREAD if name in columns)
    return replace(found, unread=unread) if found else None


def _format_of(table: Table, columns: Mapping[str, str]) -> ChatFormat | None:
    """Return the format of a table; `columns` are its columns by their names in lower case."""
    chats = [name for name in CHAT_COLUMNS if name in columns]
    if len(chats) == 1 and not {"text", "label"} & columns.keys():
        column = columns[chats[0]]
        first = next((v for v in table.spread(column, 20) if v), None)
        if messages_of(first) is not None:
            shared = isinstance(first, list) and "from" in first[0]
            return ChatFormat("ShareGPT" if shared else "OpenAI messages", column, None)
        return None
    if {"text", "label"} <= columns.keys():
        return None
    if {"instruction", "input", "output"} <= columns.keys():
        template = f"{{{columns['instruction']}}}\n\n{{{columns['input']}}}"
        return ChatFormat("Alpaca", template, columns["output"])
    pairs = [(columns[a], columns[b]) for a, b in _PAIRS if a in columns and b in columns]
    if len(pairs) != 1 or not all(_are_texts(table, column) for column in pairs[0]):
        return None
    return ChatFormat(" and ".join(pairs[0]), *pairs[0])


def is_chat(source: str, options: DataOptions, split: str) -> bool:
    """Return whether data is chats beyond doubt, and the options name no columns.

    Args:
        source: a file or the id of a Hub dataset.
        options: the format.
        split: "train", "eval" or the name of a Hub split.

    Raises:
        DataError: the source cannot be read.
    """
    if options.text is not None or options.label is not None:
        return False
    found = recognize_format(read_table(source, options, split))
    return found is not None and found.label is None


def chat_column(source: str, options: DataOptions, split: str) -> ColumnChoice:
    """Choose the column with the chats.

    Args:
        source: a file or the id of a Hub dataset.
        options: the format, and the column if it is fixed.
        split: "train", "eval" or the name of a Hub split.

    Raises:
        DataError: the source cannot be read, or the column is in doubt.
    """
    table = read_table(source, options, split)
    found = recognize_format(table) if options.text is None else None
    if found is not None and found.label is None:
        return _choice(source, replace(options, text=found.text), split, found)
    wants = {"text": "chat"}
    return choose_columns(source, options, split, wants, labelled=False)


def instruction_columns(source: str, options: DataOptions, split: str) -> ColumnChoice | None:
    """Choose the columns of a format of instructions, or return None if there is none.

    Args:
        source: a file or the id of a Hub dataset.
        options: the format; if they name a column, none is chosen.
        split: "train", "eval" or the name of a Hub split.

    Raises:
        DataError: the source cannot be read.
    """
    if options.text is not None or options.label is not None:
        return None
    found = recognize_format(read_table(source, options, split))
    if found is None or found.label is None:
        return None
    named = replace(options, text=found.text, label=found.label)
    return _choice(source, named, split, found)


def _choice(source: str, options: DataOptions, split: str, found: ChatFormat) -> ColumnChoice:
    choice = choose_columns(source, options, split, {"text": "prompt"}, labelled=False)
    about = f"read as {found.name}: " + (
        "chats with the tokenizer's template"
        if found.label is None
        else f"text from {one_line(found.text)!r}, target from {found.label!r}"
    )
    names = ", ".join(map(one_line, found.unread))
    unread = (f"not read: {names}; write it into the texts or the messages",) if names else ()
    # An empty input of Alpaca is usual, and no note.
    read = choice.notes[: 1 + len(choice.table.notes if choice.table else ())]
    return replace(choice, notes=(*read, about, *unread))


def _are_texts(table: Table, column: str) -> bool:
    return all(isinstance(value, str) for value in table.spread(column, 20) if value is not None)


def messages_of(value: Any) -> tuple[tuple[str, str], ...] | None:
    """Return a chat as (role, content) of each message, or None if it is none.

    Messages are {role, content} or {from, value}; the roles of ShareGPT become those of templates.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return None
    messages = [_message(item) for item in value]
    return None if None in messages else tuple(m for m in messages if m is not None)


def _message(item: Any) -> tuple[str, str] | None:
    if not isinstance(item, Mapping):
        return None
    for role, content in (("role", "content"), ("from", "value")):
        name, text = item.get(role), item.get(content)
        if isinstance(name, str) and isinstance(text, str):
            # Roles of {role, content} are the template's own and stay as they are.
            return (name if role == "role" else ROLES.get(name, name)), text
    return None

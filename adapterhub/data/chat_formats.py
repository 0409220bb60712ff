"""Recognize the common formats of instruction and chat data by their columns.

Alpaca               instruction, input (may be empty), output
prompt, completion   one prompt and its completion (also: response)
OpenAI               messages, each {role: ..., content: ...}
ShareGPT             conversations, each message {from: human, value: ...}

A message has a text, a list of text parts, or no content (with tool calls). Its other keys are the
keys that chat templates read, and `weight` or `train`, which control whether it is learned. Columns
next to the messages are a system message and further template inputs: tools, documents and
chat_template_kwargs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from adapterhub.data.columns import ColumnChoice, choose_columns
from adapterhub.data.options import DataOptions
from adapterhub.data.table import UNREAD, Table, first_few, template_columns
from adapterhub.data.tables import keep_table, read_table
from adapterhub.errors import DataError, one_line

Message: TypeAlias = tuple[str, str] | tuple[str, str, str]
"""The role and the text of a message, and any other keys as JSON."""

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
    "observation": "tool",
    "function_call": "assistant",
}
_KEYS = (("role", "content"), ("from", "value"))
_LEARNED = ("weight", "train")  # keys that control whether an answer is learned
_IN_PLACE = ("tool_calls", "reasoning_content", "reasoning", "thinking", "refusal", "audio")
_TEXTS = ("text", "input_text", "output_text", "refusal")  # types of parts
CHAT_COLUMNS = ("messages", "conversations", "conversation")
ARGUMENTS = "chat_template_kwargs"
"""The key of the first message that holds a template's further inputs."""
_BESIDE = {"system": "system", "tools": "tools", "functions": "tools", "documents": "documents",
           ARGUMENTS: ARGUMENTS}  # fmt: skip
_UNREAD = ("system", "history", "tools", "images")
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("instruction", "output"),
          ("instruction", "response"))  # fmt: skip


def opening(prompt: str | Sequence[Message]) -> str | tuple[tuple[str, str], ...]:
    """Return the group key of a conversation: the messages up to the user's first one."""
    if isinstance(prompt, str):
        return prompt
    users = (number for number, message in enumerate(prompt) if message[0] == "user")
    return tuple((m[0], m[1]) for m in prompt[: next(users, len(prompt)) + 1])


@dataclass(frozen=True)
class ChatFormat:
    """A recognized format: its name, and the columns with the text and the target.

    `label` is None for chats, whose last message is the target. `beside` lists the columns read
    along with chats, and `unread` the columns that only other trainers read in these formats.
    """

    name: str
    text: str
    label: str | None
    beside: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


def recognize_format(table: Table) -> ChatFormat | None:
    """Return the unambiguous instruction or chat format of a table, or None.

    Raises:
        DataError: the table has bad responses, too, and marks them in a column.
    """
    columns = {name.lower(): name for name in table.columns}
    recognized = _format_of(table, columns)
    _refuse_unpaired(table, columns)
    if recognized is None:
        return None
    beside = tuple(columns_beside(table)) if recognized.label is None else ()
    unread = (columns[name] for name in _UNREAD if name in columns)
    return replace(recognized, beside=beside, unread=tuple(n for n in unread if n not in beside))


def _refuse_unpaired(table: Table, columns: Mapping[str, str]) -> None:
    """Reject responses with a truth value for their quality.

    Raises:
        DataError: the table has such responses.
    """
    answers = {"completion", "response", *CHAT_COLUMNS} & columns.keys()
    judged = [columns[name] for name in ("label", "labels", "desirable") if name in columns]
    if not answers or (not {"prompt", *CHAT_COLUMNS} & columns.keys()) or len(judged) != 1:
        return
    values = {v for v in table.spread(judged[0], 1000) if v is not None}
    if not values or not values <= {0, 1, "true", "false", "True", "False"}:
        return
    answer = columns[sorted(answers)[0]]
    raise DataError(
        f"{table.source} has unpaired preferences (KTO): {judged[0]!r} says which of the responses "
        f"in {answer!r} are good, and the bad ones would be learned, too",
        offenders=first_few(table.samples()),
        expected="a loss for rated responses, or good responses alone, without that column",
        hint="--task 'preference(loss_type=kto)'; or delete the rows whose "
        f"{judged[0]} is false, and that column; --task classification learns the column",
    )


def columns_beside(table: Table) -> dict[str, str]:
    """Return the columns that are read with the messages of chats, and the meaning of each."""
    kinds = {name: _BESIDE[name.lower()] for name in table.columns if name.lower() in _BESIDE}
    return {name: kind for name, kind in kinds.items() if [*kinds.values()].count(kind) == 1}


def with_beside(
    messages: tuple[Message, ...], beside: Mapping[str, str], values: Iterable[Any]
) -> tuple[Message, ...]:
    """Return a chat with the values of the columns next to its messages.

    If the chat has its own system message, the column is not used.

    Raises:
        ValueError: a value has another form.
    """
    arguments: dict[str, Any] = {}
    for (column, kind), value in zip(beside.items(), values, strict=True):
        parsed = value if kind == "system" else _from_json(value, column)
        if parsed in (None, "", [], {}):
            continue
        expected = {"system": str, ARGUMENTS: Mapping}.get(kind, list)
        if not isinstance(parsed, expected):
            raise ValueError(f"{column!r} must be {_FORMS[expected]}")
        arguments |= dict(parsed) if kind == ARGUMENTS else {kind: _without_nulls(parsed)}
        if column.lower() == "functions":
            arguments["tools"] = [_as_tool(each) for each in arguments["tools"]]
    system = arguments.pop("system", None)
    if system is not None and messages[0][0] != "system":
        messages = (("system", system), *messages)
    if not arguments:
        return messages
    keys = _keys(messages[0]) | {ARGUMENTS: arguments}
    first = (*messages[0][:2], json.dumps(keys, ensure_ascii=False, default=str))
    return (first, *messages[1:])


_FORMS = {str: "text", Mapping: "an object", list: "a list"}


def _from_json(value: Any, column: str) -> Any:
    """Return a value, parsed if it is JSON."""
    if not isinstance(value, str) or not value.strip():
        return value.strip() if isinstance(value, str) else value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"{column!r} is a text, but not JSON") from None


def _without_nulls(value: Any) -> Any:
    """Drop keys that are null, as tables do: then a schema is the same in each format."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def _as_tool(function: Any) -> Any:
    bare = isinstance(function, Mapping) and "function" not in function
    return {"type": "function", "function": function} if bare else function


def instruction_template(columns: Iterable[str]) -> str | None:
    """Return the template that joins an instruction or a question with its text.

    None if one of the two is missing or ambiguous.
    """
    named = {name.lower(): name for name in columns}
    questions = [named[name] for name in ("instruction", "question") if name in named]
    about = [named[name] for name in ("input", "context") if name in named]
    if len(questions) != 1 or len(about) != 1 or "prompt" in named:
        return None
    both = (questions[0], about[0]) if "instruction" in named else (about[0], questions[0])
    return "\n\n".join(f"{{{name}}}" for name in both)


def _format_of(table: Table, columns: Mapping[str, str]) -> ChatFormat | None:
    """Return the format of a table; `columns` maps lower-case names to its columns."""
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
    name, text, target = " and ".join(pairs[0]), *pairs[0]
    both = instruction_template(table.columns) if text.lower() == "instruction" else None
    if both and all(_are_texts(table, column) for column in template_columns(both)):
        return ChatFormat("Dolly" if "context" in columns else name, both, target)
    return ChatFormat(name, text, target)


def is_chat(source: str, options: DataOptions, split: str) -> bool:
    """Return whether the data clearly holds chats, and the options do not name columns.

    Raises:
        DataError: the source cannot be read.
    """
    if options.text is not None or options.label is not None:
        return False
    recognized = recognize_format(read_table(source, options, split))
    return recognized is not None and recognized.label is None


def chat_column(source: str, options: DataOptions, split: str) -> ColumnChoice:
    """Infer the column with the chats.

    Raises:
        DataError: the source cannot be read, or the column is ambiguous.
    """
    table = read_table(source, options, split)
    recognized = recognize_format(table) if options.text is None else None
    if recognized is not None and recognized.label is None:
        return _choice(table, source, replace(options, text=recognized.text), split, recognized)
    kinds = {"text": "chat"}
    return choose_columns(source, options, split, kinds, labelled=False)


def instruction_columns(source: str, options: DataOptions, split: str) -> ColumnChoice | None:
    """Return the columns of an instruction format, or None for data in other formats.

    Raises:
        DataError: the source cannot be read.
    """
    if options.text is not None or options.label is not None:
        return None
    table = read_table(source, options, split)
    recognized = recognize_format(table)
    if recognized is None or recognized.label is None:
        return None
    named = replace(options, text=recognized.text, label=recognized.label)
    return _choice(table, source, named, split, recognized)


def _choice(
    table: Table, source: str, options: DataOptions, split: str, recognized: ChatFormat
) -> ColumnChoice:
    keep_table(table, source, options, split)
    choice = choose_columns(source, options, split, {"text": "prompt"}, labelled=False)
    about = f"read as {recognized.name}: " + (
        ", ".join(["chats with the tokenizer's template", *map(one_line, recognized.beside)])
        if recognized.label is None
        else f"text from {one_line(recognized.text)!r}, target from {recognized.label!r}"
    )
    names = ", ".join(map(one_line, recognized.unread))
    unread = (f"{UNREAD}{names}; write it into the texts or the messages",) if names else ()
    # Empty inputs are usual in Alpaca and need no note.
    read = choice.notes[: 1 + len(choice.table.notes if choice.table else ())]
    return replace(choice, notes=(*read, about, *unread))


def _are_texts(table: Table, column: str) -> bool:
    return all(isinstance(value, str) for value in table.spread(column, 20) if value is not None)


def messages_of(value: Any) -> tuple[Message, ...] | None:
    """Return the messages of a chat, or None if the value is not a chat.

    Messages are {role, content} or {from, value}; ShareGPT's roles become template roles.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return None
    messages = [_message(item) for item in value]
    return None if None in messages else tuple(m for m in messages if m is not None)


def message_keys(item: Any) -> tuple[str, str] | None:
    """Return the keys of a message's role and content; None if it is not a message."""
    if not isinstance(item, Mapping):
        return None
    return next((keys for keys in _KEYS if isinstance(item.get(keys[0]), str)), None)


def _message(item: Any) -> Message | None:
    if (named := message_keys(item)) is None:
        return None
    role, content = named
    # Tables give each message the keys of all messages.
    keys = {k: v for k, v in item.items() if v is not None and k not in (role, content)}
    value, name = item.get(content), str(item.get(role))
    text = _text(value)
    if text is None or (value is None and not keys):
        return None
    if not isinstance(value, str):
        keys["content"] = value
    if role == "from" and name == "function_call":
        keys |= _called(text)
    if role == "from":
        name = ROLES.get(name, name)  # roles of {role, content} are the template's own
    if "function_call" in keys and "tool_calls" not in keys:
        keys["tool_calls"] = [{"type": "function", "function": keys.pop("function_call")}]
    if not keys:
        return name, text
    return name, text, json.dumps(keys, ensure_ascii=False, default=str)


def _text(content: Any) -> str | None:
    """Return the text of a content; None if it has parts other than text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not all(map(_is_text, content)):
        return None
    return "".join(map(part_text, content))


def part_text(part: Any) -> str:
    """Return the text of a part of a content."""
    return part if isinstance(part, str) else str(part.get("text") or part.get("refusal") or "")


def _is_text(part: Any) -> bool:
    if isinstance(part, str):
        return True
    texts = (part.get("text"), part.get("refusal")) if isinstance(part, Mapping) else ()
    known = isinstance(part, Mapping) and part.get("type", "text") in _TEXTS
    return known and any(isinstance(text, str) for text in texts)


def _called(text: str) -> dict[str, Any]:
    """Return the tool calls of a function-call message, which holds them as JSON."""
    try:
        calls = json.loads(text)
    except ValueError:
        return {}
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, Mapping) and "name" in call for call in calls):
        return {}
    functions = [{"type": "function", "function": call} for call in calls]
    return {"content": None, "tool_calls": functions}


def turns_of(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return messages in the form passed to templates, without null keys."""
    turns = ({"role": m[0], "content": m[1]} | _keys(m) for m in messages)
    return [{k: v for k, v in t.items() if v is not None and k not in _LEARNED} for t in turns]


def with_arguments(
    messages: tuple[Message, ...], arguments: Mapping[str, Any]
) -> tuple[Message, ...]:
    """Return a chat with chat template arguments; its own arguments take precedence."""
    if not arguments or not messages:
        return messages
    keys = _keys(messages[0])
    keys[ARGUMENTS] = {**arguments, **keys.get(ARGUMENTS, {})}
    return ((*messages[0][:2], json.dumps(keys, ensure_ascii=False)), *messages[1:])


def behind_turns(messages: tuple[Message, ...], turns: Sequence[Message]) -> tuple[Message, ...]:
    """Return a chat with turns inserted after its instructions.

    A template's further inputs stay with the first message.
    """
    start = next((n for n, m in enumerate(messages) if m[0] != "system"), len(messages))
    if start or not turns or not messages:
        return (*messages[:start], *turns, *messages[start:])
    keys = _keys(messages[0])
    arguments = keys.pop(ARGUMENTS, {})
    first = (*messages[0][:2], json.dumps(keys, ensure_ascii=False)) if keys else messages[0][:2]
    return with_arguments((*turns, first, *messages[1:]), arguments)


def shared_arguments(chats: Iterable[Sequence[Message]]) -> dict[str, Any]:
    """Return the template arguments shared by all chats, except tools and documents."""
    shared: list[dict[str, Any]] = []
    for messages in chats:
        arguments = _keys(messages[0]).get(ARGUMENTS, {}) if messages else {}
        own = {k: v for k, v in arguments.items() if k not in ("tools", "documents")}
        if not own or (shared and own != shared[0]):
            return {}
        shared = [own]
    return shared[0] if shared else {}


def is_learned(message: Message) -> bool:
    """Return whether a message is learned: assistant messages are, unless their `weight` is 0."""
    return message[0] == "assistant" and all(bool(_keys(message).get(k, True)) for k in _LEARNED)


def as_read(message: Message) -> Message:
    """Return a message that is read but not learned."""
    keys = json.dumps(_keys(message) | {"weight": 0}, ensure_ascii=False)
    return (*message[:2], keys) if message[0] == "assistant" else message


def may_be_empty(message: Message) -> bool:
    """Return whether a message may lack text, such as a tool result or a tool call."""
    return message[0] in ("system", "tool") or any(key in _keys(message) for key in _IN_PLACE)


def weight_problem(message: Message) -> str:
    """Describe the error in the keys that control whether a message is learned."""
    weights = {key: value for key, value in _keys(message).items() if key in _LEARNED}
    wrong = [f"{key} is {value!r}" for key, value in weights.items() if value not in (0, 1)]
    return f"{wrong[0]}: expected 0 or 1" if wrong else ""


def _keys(message: Message) -> dict[str, Any]:
    keys: dict[str, Any] = json.loads(message[2]) if len(message) > 2 else {}
    return keys

"""Formats of instructions and chats are recognized by their columns."""

from __future__ import annotations

import json

import pytest

from adapterhub.data.chat_formats import (
    chat_column,
    instruction_columns,
    is_chat,
    messages_of,
    recognize_format,
)
from adapterhub.data.options import DataOptions
from adapterhub.data.tables import read_table

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
SHARED = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
FORMATS = {
    "Alpaca": ({"instruction": "add", "input": "1 2", "output": "3"}, "{instruction}\n\n{input}",
               "output"),
    "instruction and output": ({"instruction": "go", "output": "ok"}, "instruction", "output"),
    "prompt and completion": ({"prompt": "a", "completion": "b", "id": 3}, "prompt", "completion"),
    "OpenAI messages": ({"messages": TURNS}, "messages", None),
    "ShareGPT": ({"id": "x", "conversations": SHARED}, "conversations", None),
}  # fmt: skip
NONE = [
    {"text": "a", "label": "b", "instruction": "c", "output": "d"},
    {"question": "a", "answer": "b"},
    {"messages": "no list"},
    {"messages": [{"role": "user"}]},
    {"conversations": [[]]},
    {"prompt": ["a"], "completion": ["b"]},
    {"prompt": "a", "completion": "b", "response": "c"},
    {"messages": TURNS, "conversations": SHARED},
]


def write(folder, row):
    file = folder / "a.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 3)
    return str(file)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_recognized_and_told(tmp_path, name):
    row, text, label = FORMATS[name]
    source = write(tmp_path, row)
    found = recognize_format(read_table(source, DataOptions(), "train"))
    assert (found.name, found.text, found.label) == (name, text, label)
    assert is_chat(source, DataOptions(), "train") is (label is None)
    choice = instruction_columns(source, DataOptions(), "train")
    if label is None:
        assert choice is None
        choice = chat_column(source, DataOptions(), "train")
    assert (choice.options.text, choice.options.label) == (text, label or "label")
    assert f"read as {name}" in choice.notes[-1]
    assert "\n" not in choice.notes[-1]


@pytest.mark.parametrize("name", FORMATS)
def test_columns_that_are_left_out_are_told(tmp_path, name):
    row = FORMATS[name][0] | {"system": "Be brief.", "history": [["a", "b"]]}
    source = write(tmp_path, row)
    found = instruction_columns(source, DataOptions(), "train")
    choice = found or chat_column(source, DataOptions(), "train")
    unread = "history" if FORMATS[name][2] is None else "system, history"
    assert f"not read: {unread};" in choice.notes[-1]
    assert ("template, system" in " ".join(choice.notes)) == (FORMATS[name][2] is None)


@pytest.mark.parametrize("row", NONE, ids=str)
def test_other_data_is_no_format(tmp_path, row):
    source = write(tmp_path, row)
    assert recognize_format(read_table(source, DataOptions(), "train")) is None
    assert instruction_columns(source, DataOptions(), "train") is None
    assert not is_chat(source, DataOptions(), "train")


def test_a_named_column_turns_recognition_off(tmp_path):
    source = write(tmp_path, FORMATS["Alpaca"][0])
    assert instruction_columns(source, DataOptions(text="input"), "train") is None
    source = write(tmp_path, FORMATS["ShareGPT"][0])
    assert not is_chat(source, DataOptions(text="id"), "train")


def test_messages_have_the_roles_of_templates():
    assert messages_of(SHARED) == messages_of(TURNS) == (("user", "hi"), ("assistant", "hello"))
    assert messages_of([{"role": "tool", "content": "x"}]) == (("tool", "x"),)
    for other in (None, "hi", [], [{"role": 1, "content": "x"}], [3], {"role": "user"}):
        assert messages_of(other) is None

"""Chats: tokens are those of the template on the whole chat, answers what it kept of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures import write_json_lines
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks._rows import IGNORED

START, END = "<|im_start|>", "<|im_end|>"
CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '<call>' ~ c.function.name ~ ' ' }}"
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments|tojson }}"
    "{% endfor %}"
)
TEMPLATES = {
    # Only texts, and nothing but them.
    "texts": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    # Reasoning is kept behind the last question; the last answer always has its place.
    "reasoning": "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% set c = m.content if m.content is string else '' %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% set r = m.reasoning_content or '' %}{% if '</think>' in c %}"
    "{% set r = c.split('</think>')[0].split('<think>')[-1] %}"
    "{% set c = c.split('</think>')[-1].strip() %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or r) %}{{ '<think>\n' + r + '\n</think>\n' }}"
    "{% endif %}{% endif %}{{ c }}" + CALLS + "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    # A beginning of an answer that the text of a whole chat has not.
    "thinking": "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|a|>' + (m.content or '').split('</think>')[-1] }}" + CALLS + "{{ '<|im_end|>' }}"
    "{% else %}{{ '<|u|>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|a|><think>\n' }}{% endif %}",
    # The last question is written in another way, and arguments are objects.
    "rewriting": "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ ' ' + (m.content or '') }}{% for c in m.tool_calls or [] %}"
    "{{ '[CALL]' ~ c.function.name ~ c.function.arguments|tojson }}"
    "{% endfor %}{{ '<|im_end|>' }}{% else %}"
    "{{ '[INST]' + ('now ' if loop.index > messages|length - 2 else '') + m.content + '[/INST]' }}"
    "{% endif %}{% endfor %}",
    "parts": "{% for m in messages %}{{ '<' ~ m.role ~ '>' }}{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for p in m.content or [] %}{{ p.text }}{% endfor %}{% endif %}"
    + CALLS + "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
}  # fmt: skip


def calls(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": arguments}
    return [{"id": "1", "type": "function", "function": function}]


def turns(*contents: Any, **last: Any) -> list[dict[str, Any]]:
    roles = ("user", "assistant") * len(contents)
    messages = [
        {"role": role, "content": text} for role, text in zip(roles, contents, strict=False)
    ]
    return [*messages[:-1], messages[-1] | last]


def part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


TOOL = {"role": "tool", "content": "12", "tool_call_id": "1"}
ASKED = turns("q1", None, tool_calls=calls('{"city": "Paris"}'))
# The messages, and what must be learned of each answer, besides the end of its turn.
CHATS: dict[str, tuple[list[dict[str, Any]], tuple[str, ...]]] = {
    "two turns": (turns("q1", "a1", "q2", "a2"), ("a1", "a2")),
    "two turns with reasoning": (
        turns("q1", "<think>r1</think>a1", "q2", "<think>r2</think>a2"), ("a1", "a2"),
    ),
    "reasoning beside": (
        [*turns("q1", "a1", reasoning_content="r1"), *turns("q2", "a2", reasoning_content="r2")],
        ("a1", "a2"),
    ),
    "no content": ([*ASKED, TOOL, {"role": "assistant", "content": "a2"}], ("weather", "a2")),
    "no key content": (
        [{k: v for k, v in m.items() if v is not None} for m in ASKED]
        + [TOOL, {"role": "assistant", "content": "a2"}],
        ("weather", "a2"),
    ),
    "arguments as objects": (
        [*turns("q1", "so", tool_calls=calls({"city": "Paris"})), TOOL, *turns("q1", "a2")[1:]],
        ("weather", "a2"),
    ),
    "parts": (turns(part("q1"), part("a1"), part("q2"), part("a2")), ("a1", "a2")),
    "two answers": ([*turns("q1", "a1"), {"role": "assistant", "content": "a2"}], ("a1", "a2")),
    "weight": ([*turns("q1", "a1", weight=0), *turns("q2", "a2", weight=1)], ("a2",)),
    "train": ([*turns("q1", "a1", train=False), *turns("q2", "a2")], ("a2",)),
    "null keys": (turns("q1", "a1", tool_calls=None, refusal=None, name=None), ("a1",)),
    "ShareGPT": (
        [
            {"from": "human", "value": "q1"},
            {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "x"}}'},
            {"from": "observation", "value": "12"},
            {"from": "gpt", "value": "a2", "weight": 1},
        ],
        ("weather", "a2"),
    ),
    "function_call": (
        [
            *turns("q1", None, function_call={"name": "weather", "arguments": '{"city": "x"}'}),
            TOOL,
            {"role": "assistant", "content": "a2"},
        ],
        ("weather", "a2"),
    ),
}  # fmt: skip


def byte_tokenizer() -> Any:
    inner = Tokenizer(
        models.BPE({c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, [])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="<pad>")
    made.add_special_tokens({"additional_special_tokens": [START, END]})
    return made


def learned(row: Any, tokenizer: Any) -> list[str]:
    """Return the texts that are learned, one for each run of tokens."""
    runs: list[list[int]] = [[]]
    for label in row["labels"]:
        if label != IGNORED:
            runs[-1].append(label)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize("kind", ["fast", "python"])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", CHATS)
def test_a_chat_has_the_tokens_of_the_template_and_learns_what_it_kept(
    name: str, template: str, kind: str, tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer() if kind == "fast" else ByT5Tokenizer()
    tokenizer.chat_template = TEMPLATES[template]
    messages, answers = CHATS[name]
    file = write_json_lines(tmp_path / "chats.jsonl", [{"messages": messages}])
    task, choice = parse_task("causal-lm").fitted(str(file), DataOptions(), "train")
    examples = task.read(str(file), choice.options, "train")
    (row,) = task.encode(examples, Setting(tokenizer, 2000), labelled=True).rows
    text = tokenizer.decode(row["input_ids"])
    if name not in ("ShareGPT", "function_call") and template != "rewriting":
        given = [m if m.get("content") is not None else m | {"content": ""} for m in messages]
        given = [{k: v for k, v in m.items() if k not in ("weight", "train")} for m in given]
        if template != "parts":
            given = [
                m | {"content": m["content"][0]["text"]} if isinstance(m["content"], list) else m
                for m in given
            ]
        whole = tokenizer.apply_chat_template(given, tokenize=False)
        assert text == whole
        if kind == "fast":
            assert row["input_ids"] == tokenizer(whole, add_special_tokens=False)["input_ids"]
    calling = "weather" in answers
    if template == "texts" and calling:  # it does not write calls: nothing of that answer is kept
        answers = answers[1:]
    found = "".join(learned(row, tokenizer))
    assert [a for a in ("a1", "a2", "weather") if a in found] == sorted(answers)
    assert not [word for word in ("q1", "q2", "INST", "12", "user") if word in found]
    said = template == "texts" and name == "arguments as objects"  # a text beside the call
    assert found.count(END) == len(answers) + said
    keeps = template in ("texts", "rewriting", "parts") and name == "two turns with reasoning"
    assert text.count("r1") == keeps


def test_keys_that_a_template_does_not_use_are_named_once(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES["reasoning"]
    messages = [*turns("q1", None, tool_calls=calls("{}"), refusal="no", weight=1), TOOL]
    messages += [{"role": "assistant", "content": "a", "reasoning_content": "r", "name": "x"}]
    file = write_json_lines(tmp_path / "chats.jsonl", [{"messages": messages}] * 3)
    task = parse_task("causal-lm(data=chat)")
    options = DataOptions(text="messages")
    encoded = task.encode(
        task.read(str(file), options, "train"), Setting(tokenizer, 99), labelled=True
    )
    (line,) = task.remarks(encoded)
    assert line == (
        "keys and columns that the chat template does not use: 'refusal' (3), 'tool_call_id' (3), "
        "'name' (3)"
    )


FUNCTION = {"name": "weather", "description": "now", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
GIVEN = "{% if tools %}<t>{{ tools|tojson }}</t>{% endif %}{% if think %}<think>{% endif %}"
# What stands beside the messages, what transformers is given for it, and the system message.
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "tools": ({"tools": TOOLS}, {"tools": TOOLS}, None),
    "tools as JSON": ({"tools": json.dumps(TOOLS)}, {"tools": TOOLS}, None),
    "functions": ({"functions": [FUNCTION]}, {"tools": TOOLS}, None),
    "no tools": ({"tools": "[]"}, {}, None),
    "empty": ({"tools": "", "system": ""}, {}, None),
    "null": ({"tools": None, "system": None}, {}, None),
    "nulls inside": ({"tools": [TOOLS[0] | {"strict": None}]}, {"tools": TOOLS}, None),
    "system": ({"system": "be brief"}, {}, "be brief"),
    "both": ({"tools": TOOLS, "system": "be brief"}, {"tools": TOOLS}, "be brief"),
    "arguments": ({"chat_template_kwargs": {"think": True}}, {"think": True}, None),
    "arguments of the call": ({"chat_template_kwargs": {"tokenize": True}}, {}, None),
}


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("template", ["reasoning", "parts"])
@pytest.mark.parametrize("first", ["user", "assistant", "system"])
@pytest.mark.parametrize("name", BESIDE)
def test_columns_beside_a_chat_are_given_to_its_template(
    name: str, first: str, template: str, prompt: bool, tmp_path: Path
) -> None:
    columns, given, system = BESIDE[name]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = GIVEN + TEMPLATES[template]
    messages = turns("q1", "a1", "q2", "a2")
    if first != "user":
        messages = [{"role": first, "content": "first"}, *messages]
    file = write_json_lines(tmp_path / "chats.jsonl", [{"messages": messages, **columns}])
    task, choice = parse_task("causal-lm").fitted(str(file), DataOptions(), "train")
    read = task.read(str(file), choice.options, "train")
    (row,) = task.encode(read, Setting(tokenizer, 2000), labelled=not prompt).rows
    if system is not None and first != "system":
        messages = [{"role": "system", "content": system}, *messages]
    expected = tokenizer.apply_chat_template(
        messages[:-1] if prompt else messages, tokenize=False, add_generation_prompt=prompt, **given
    )
    assert tokenizer.decode(row["input_ids"]) == expected
    if not prompt:
        said = "".join(learned(row, tokenizer))
        assert [a for a in ("a1", "a2") if a in said] == ["a1", "a2"]
        assert ("first" in said) == (first == "assistant")
        assert "weather" not in said


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"tools": "{"}, "'tools' is a text, but not JSON"),
        ({"tools": {"a": 1}}, "'tools' is no list"),
        ({"system": ["x"]}, "'system' is no text"),
        ({"chat_template_kwargs": [1]}, "'chat_template_kwargs' is no object"),
    ],
)
def test_columns_of_another_form_are_refused(
    columns: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    file = write_json_lines(tmp_path / "chats.jsonl", [{"messages": turns("q1", "a1"), **columns}])
    with pytest.raises(DataError, match=expected):
        parse_task("causal-lm(data=chat)").read(str(file), DataOptions(text="messages"), "train")


def test_columns_that_a_template_does_not_use_are_named(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES["parts"]
    row = {"messages": turns("q1", "a1"), "tools": TOOLS, "chat_template_kwargs": {"think": True}}
    file = write_json_lines(tmp_path / "chats.jsonl", [row] * 2)
    task = parse_task("causal-lm(data=chat)")
    read = task.read(str(file), DataOptions(text="messages"), "train")
    (line,) = task.remarks(task.encode(read, Setting(tokenizer, 99), labelled=True))
    assert line.endswith("does not use: 'tools' (2), 'think' (2)")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"weight": 0.5}, "weight is 0.5: expected 0 or 1"),
        ({"content": None}, "not a list of messages"),
        ({"content": [{"type": "image", "image": "x"}]}, "not a list of messages"),
        ({"content": ""}, "'assistant' is empty"),
        ({"content": None, "name": "x"}, "'assistant' is empty"),
    ],
)
def test_messages_of_other_shapes_are_refused(
    change: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": turns("q1", "a1", **change)}))
    with pytest.raises(DataError, match=expected):
        parse_task("causal-lm(data=chat)").read(str(file), DataOptions(text="messages"), "train")


def test_a_preference_names_no_calls_as_texts(tmp_path: Path) -> None:
    row = {"chosen": turns("q1", "a1", tool_calls=calls("{}")), "rejected": turns("q1", "a2")}
    file = write_json_lines(tmp_path / "rows.jsonl", [row])
    task, choice = parse_task("preference").fitted(str(file), DataOptions(), "train")
    with pytest.raises(DataError, match="a response has calls of tools"):
        task.read(str(file), choice.options, "train")

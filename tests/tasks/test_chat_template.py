"""Chats: tokens are those of the template on the whole chat, answers what it kept of each."""

import itertools
import json
import shutil

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common.base import dump_task
from adapterhub.tasks.common.batches import IGNORED
from adapterhub.training.run import prepare
from tests.kit import stand_ins
from tests.kit.data import write_json_lines

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


def calls(arguments):
    function = {"name": "weather", "arguments": arguments}
    return [{"id": "1", "type": "function", "function": function}]


def turns(*contents, **last):
    """Return messages of the user and the assistant in turn; the last one has other keys, too."""
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for text, role in zip(contents, roles)]  # noqa: B905
    return [*messages[:-1], messages[-1] | last]


def part(text):
    return [{"type": "text", "text": text}]


TOOL = {"role": "tool", "content": "12", "tool_call_id": "1"}
ASKED = turns("q1", None, tool_calls=calls('{"city": "Paris"}'))
A2 = {"role": "assistant", "content": "a2"}
# The messages, and what must be learned of each answer, besides the end of its turn.
CHATS = {
    "two turns with reasoning": (
        turns("q1", "<think>r1</think>a1", "q2", "<think>r2</think>a2"), ("a1", "a2"),
    ),
    "reasoning beside": (
        [*turns("q1", "a1", reasoning_content="r1"), *turns("q2", "a2", reasoning_content="r2")],
        ("a1", "a2"),
    ),
    "no content": ([*ASKED, TOOL, A2], ("weather", "a2")),
    "no key content": (
        [*({k: v for k, v in m.items() if v is not None} for m in ASKED), TOOL, A2],
        ("weather", "a2"),
    ),
    "arguments as objects": (
        [*turns("q1", "so", tool_calls=calls({"city": "Paris"})), TOOL, A2], ("weather", "a2"),
    ),
    "parts": (turns(part("q1"), part("a1"), part("q2"), part("a2")), ("a1", "a2")),
    "two answers": ([*turns("q1", "a1"), A2], ("a1", "a2")),
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
        [*turns("q1", None, function_call={"name": "weather", "arguments": "{}"}), TOOL, A2],
        ("weather", "a2"),
    ),
}  # fmt: skip


def byte_tokenizer():
    made = stand_ins.byte_tokenizer()
    made.add_special_tokens({"additional_special_tokens": [START, END]})
    return made


def learned(row, tokenizer):
    """Return the texts that are learned, one for each run of tokens."""
    runs = itertools.groupby(row["labels"], lambda label: label != IGNORED)
    return [tokenizer.decode(list(run)) for kept, run in runs if kept]


def examples_of(spec, rows, folder):
    """Return the task for some rows, and its examples."""
    file = write_json_lines(folder / "rows.jsonl", rows)
    task, choice = parse_task(spec).fitted(str(file), DataOptions(), "train")
    return task, task.read(str(file), choice.options, "train")


def rows_of(spec, tokenizer, rows, folder):
    """Encode rows as a run does; of comparisons, the chosen response."""
    task, examples = examples_of(spec, rows, folder)
    encoded = task.encode(examples, Setting(tokenizer, 2000), labelled=True).rows
    return [row["responses"][0] if "responses" in row else row for row in encoded]


@pytest.mark.parametrize("kind", ["fast", "python"])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", CHATS)
def test_a_chat_has_the_tokens_of_the_template_and_learns_what_it_kept(
    name, template, kind, tmp_path
):
    tokenizer = byte_tokenizer() if kind == "fast" else ByT5Tokenizer()
    tokenizer.chat_template = TEMPLATES[template]
    messages, answers = CHATS[name]
    (row,) = rows_of("causal-lm", tokenizer, [{"messages": messages}], tmp_path)
    text = tokenizer.decode(row["input_ids"])
    if name not in ("ShareGPT", "function_call") and template != "rewriting":
        given = [{"content": ""} | {k: v for k, v in m.items() if v is not None} for m in messages]
        given = [{k: v for k, v in m.items() if k not in ("weight", "train")} for m in given]
        if name == "parts" and template != "parts":
            given = [m | {"content": m["content"][0]["text"]} for m in given]
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


ENDS = {
    # What a template writes behind an answer, and what of it is learned.
    "a line end": (END + "\\n", END),
    "two line ends": (END + "\\n\\n", END),
    "a space": ("</s> ", "</s>"),
    "nothing else": (END, END),
    "two tokens": (END + "\\n</s>\\n", END + "\n</s>"),
    "a text": ("[/END]\\n", "[/END]"),
    "a line end alone": ("\\n", "\n"),
}
ROLES = "{% for m in messages %}{{ '<' ~ m.role ~ '>' }}"
OPENED = "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"


ANSWERED = {
    "causal-lm": ({"messages": turns("q1", "a1", "q2", "a 2")}, ["a1", "a 2"]),
    "causal-lm(data=pairs)": ({"prompt": "q1", "response": "a1"}, ["a1"]),
    "preference": ({"prompt": "q1", "chosen": "a1", "rejected": "a2"}, ["a1"]),
    "preference(data=chat)": ({"chosen": turns("q1", "a1"), "rejected": turns("q1", "b")}, ["a1"]),
    "reward": ({"prompt": "q1", "chosen": "a1", "rejected": "a2"}, ["a1"]),
}


@pytest.mark.parametrize("task", ANSWERED)
@pytest.mark.parametrize("ends", ENDS)
def test_what_follows_the_end_of_a_turn_is_not_learned(ends, task, tmp_path):
    written, kept = ENDS[ends]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = f"{ROLES}{{{{ m.content ~ '{written}' }}}}{{% endfor %}}{OPENED}"
    row, answers = ANSWERED[task]
    (encoded,) = rows_of(task, tokenizer, [row], tmp_path)
    assert learned(encoded, tokenizer) == [answer + kept for answer in answers]


MARKED = {
    # The content and the end of its turn; each alone; a part; blocks in blocks; with calls.
    "content and end": "{% generation %}{{ m.content ~ '<|im_end|>' }}{% endgeneration %}\n",
    "content": "{%- generation -%}{{ m.content }}{%- endgeneration -%}<|im_end|>\n",
    "with the line end": "{% generation %}{{ m.content ~ '<|im_end|>\\n' }}{% endgeneration %}",
    "behind a space": " {% generation %}{{ m.content }}<|im_end|>{% endgeneration %}",
    "in parts": "{% generation %}{{ m.content[:1] }}{% endgeneration %}-"
    "{% generation %}{{ m.content[1:] }}{% endgeneration %}",
    "blocks in blocks": "{% generation %}a{% generation %}{{ m.content }}{% endgeneration %}b"
    "{% endgeneration %}",
    "with calls": "{% generation %}{{ m.content }}" + CALLS + "<|im_end|>{% endgeneration %}\n",
    "the last alone": "{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}",
    "with reasoning": "{% generation %}{{ m.reasoning_content or '' }}{% endgeneration %}"
    "{{ m.content }}",
}
MARKED_CHATS = {
    "one turn": turns("q1", "a1"),
    "turns": turns("q1", "a1", "q2", "a 2", "q3", "a3"),
    "two answers": [*turns("q1", "a1"), A2],
    "calls": [
        *turns("q1", "so", tool_calls=calls({"city": "Paris"})),
        {"role": "tool", "content": "12"},
        A2 | {"reasoning_content": "r2"},
    ],
    "a system message": [{"role": "system", "content": "s"}, *turns("q1", "a1", "q2", "a2")],
}


@pytest.mark.parametrize("chat", MARKED_CHATS)
@pytest.mark.parametrize("marks", MARKED)
def test_marks_of_a_template_are_learned_as_transformers_masks_them(marks, chat, tmp_path):
    tokenizer = byte_tokenizer()
    other = "{% if m.role != 'assistant' %}{{ m.content ~ '<|im_end|>\\n' }}{% else %}"
    tokenizer.chat_template = f"{ROLES}{other}{MARKED[marks]}{{% endif %}}{{% endfor %}}{OPENED}"
    messages = MARKED_CHATS[chat]
    (row,) = rows_of("causal-lm", tokenizer, [{"messages": messages}], tmp_path)
    expected = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert row["input_ids"] == expected["input_ids"]
    assert [int(label != IGNORED) for label in row["labels"]] == expected["assistant_masks"]


def test_line_ends_weights_and_tokens_that_end_in_a_mark(tmp_path):
    """What an answer itself ends with is learned; one without a weight is not."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES["texts"]
    (row,) = rows_of("causal-lm", tokenizer, [{"messages": turns("q1", "a1\n\n")}], tmp_path)
    assert learned(row, tokenizer) == ["a1\n\n" + END]
    marked = f"{{% if m.role == 'assistant' %}}{MARKED['content']}{{% else %}}{{{{ m.content }}}}"
    tokenizer.chat_template = f"{ROLES}{marked}{{% endif %}}{{% endfor %}}{OPENED}"
    chat = [*turns("q1", "a1", weight=0), *turns("q2", "a2"), *turns("q3", "a3", train=False)]
    (row,) = rows_of("causal-lm", tokenizer, [{"messages": chat}], tmp_path)
    assert learned(row, tokenizer) == ["a2"]
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "Aq1B": 1, "a1": 2, " a1": 3}))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    mark = "{% generation %}{{ m.content }}{% endgeneration %}"
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}A{{ m.content }}B {% else %}"
        f"{mark}{{% endif %}}{{% endfor %}}"
    )
    (row,) = rows_of("causal-lm", tokenizer, [{"messages": turns("q1", "a1")}], tmp_path)
    assert row["input_ids"] == [1, 3]
    assert row["labels"] == [IGNORED, 3]


FUNCTION = {"name": "weather", "description": "now", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
GIVEN = "{% if tools %}<t>{{ tools|tojson }}</t>{% endif %}{% if think %}<think>{% endif %}"
# What stands beside the messages, what transformers is given for it, and the system message.
BESIDE = {
    "tools": ({"tools": TOOLS}, {"tools": TOOLS}, None),
    "tools as JSON": ({"tools": json.dumps(TOOLS)}, {"tools": TOOLS}, None),
    "functions": ({"functions": [FUNCTION]}, {"tools": TOOLS}, None),
    "no tools": ({"tools": "[]", "system": None}, {}, None),
    "empty": ({"tools": "", "system": ""}, {}, None),
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
def test_columns_beside_a_chat_are_given_to_its_template(name, first, template, prompt, tmp_path):
    columns, given, system = BESIDE[name]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = GIVEN + TEMPLATES[template]
    messages = turns("q1", "a1", "q2", "a2")
    if first != "user":
        messages = [{"role": first, "content": "first"}, *messages]
    task, examples = examples_of("causal-lm", [{"messages": messages, **columns}], tmp_path)
    (row,) = task.encode(examples, Setting(tokenizer, 2000), labelled=not prompt).rows
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
    ("columns", "change", "expected"),
    [
        ({"tools": "{"}, {}, "'tools' is a text, but not JSON"),
        ({"tools": {"a": 1}}, {}, "'tools' must be a list"),
        ({"system": ["x"]}, {}, "'system' must be text"),
        ({"chat_template_kwargs": [1]}, {}, "'chat_template_kwargs' must be an object"),
        ({}, {"weight": 0.5}, "weight is 0.5: expected 0 or 1"),
        ({}, {"content": None}, "not a list of messages"),
        ({}, {"content": [{"type": "image", "image": "x"}]}, "not a list of messages"),
        ({}, {"content": ""}, "'assistant' is empty"),
        ({}, {"content": None, "name": "x"}, "'assistant' is empty"),
    ],
)
def test_columns_and_messages_of_another_form_are_refused(columns, change, expected, tmp_path):
    row = {"messages": turns("q1", "a1", **change), **columns}
    file = write_json_lines(tmp_path / "chats.jsonl", [row])
    with pytest.raises(DataError, match=expected):
        parse_task("causal-lm(data=chat)").read(str(file), DataOptions(text="messages"), "train")
    called = {"chosen": turns("q1", "a1", tool_calls=calls("{}")), "rejected": turns("q1", "a2")}
    with pytest.raises(DataError, match="a response has calls of tools"):
        examples_of("preference", [called], tmp_path)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([{"think": False, "tools": TOOLS}] * 3, '{"think": false}'),
        ([{"think": False}, {"think": True}, {"think": False}], None),
        ([{"think": False}, {}, {"think": False}], None),
        ([{"tools": TOOLS}] * 3, None),
        ([{}] * 3, None),
    ],
)
def test_prompts_are_written_as_all_chats_of_the_training(tmp_path, given, kept):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if think is defined and not think %}<no>{% endif %}"
    )
    rows = [{"messages": turns("q1", "a1"), "chat_template_kwargs": each} for each in given]
    task, examples = examples_of("causal-lm(data=chat)", rows, tmp_path)
    task = task.for_examples(examples)
    assert task.template_arguments == kept
    assert parse_task(dump_task(task)) == task

    def text(*messages):
        row = task.encode([task.chat_example(messages)], Setting(tokenizer, 99), labelled=False)
        return tokenizer.decode(row.rows[0]["input_ids"])

    assert text(("user", "hi")) == ("hi<no>" if kept else "hi")
    own = json.dumps({"chat_template_kwargs": {"think": True}})
    assert text(("user", "hi", own)) == "hi"


ALPACA = {"instruction": "the movie", "input": "", "output": "good"}
COMPARED = {"prompt": "the movie", "chosen": "good", "rejected": "bad"}
FORMS = {
    "Alpaca": ("causal-lm", ALPACA, "the movie"),
    "Alpaca with an input": ("causal-lm", ALPACA | {"input": "a plot"}, "the movie a plot"),
    "columns": ("causal-lm", {"text": "the movie", "label": "good"}, "the movie"),
    "preference": ("preference", COMPARED, "the movie"),
    "reward": ("reward", COMPARED, "the movie"),
}  # fmt: skip
WAYS = {"chat": "", "plain": "", "off": "template='{text}'"}
CELLS = [(form, "chat") for form in FORMS]
CELLS += [(form, way) for form in ("Alpaca", "preference", "reward") for way in ("plain", "off")]


@pytest.fixture(scope="module")
def without_template(backbones, tmp_path_factory):
    """The tiny Llama with a tokenizer without a chat template."""
    folder = shutil.copytree(backbones("llama"), tmp_path_factory.mktemp("plain") / "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("form", "way"), CELLS)
def test_pairs_are_written_by_the_chat_template_of_a_backbone_that_has_one(
    form, way, backbones, without_template, recipe_with, tmp_path
):
    task, row, text = FORMS[form]
    backbone = without_template if way == "plain" else backbones("llama")
    data = write_json_lines(tmp_path / "rows.jsonl", [row] * 8)
    words = (f"task={task}({WAYS[way]})", f"data.train={data}", f"data.eval={data}")
    prepared = prepare(recipe_with("method=lora(rank=1)", *words, folder=backbone))
    encoded = prepared.train.rows[0]
    ids = encoded["responses"][0]["input_ids"] if "responses" in encoded else encoded["input_ids"]
    words = prepared.train.setting.tokenizer.decode(ids).split()
    chat = ["user", ":", *text.split(), "</s>", "assistant", ":"]
    prompt = chat if way == "chat" else ["<s>", *text.split()]
    assert words == [*prompt, "good", "</s>"]
    note = "written by the tokenizer's chat template; --task \"" + task
    assert sum(note in line for line in prepared.notes) == (way == "chat")
    recorded = parse_task(prepared.recipe.task).template
    assert recorded == {"chat": None, "plain": "{text}\n", "off": "{text}"}[way]


UNUSED_KEYS = [
    *turns("q1", None, tool_calls=calls("{}"), refusal="no", weight=1),
    TOOL,
    A2 | {"reasoning_content": "r", "name": "x"},
]
UNUSED_COLUMNS = {"tools": TOOLS, "chat_template_kwargs": {"think": True}}


@pytest.mark.parametrize(
    ("template", "row", "expected"),
    [
        ("reasoning", {"messages": UNUSED_KEYS}, "'refusal' (3), 'tool_call_id' (3), 'name' (3)"),
        ("parts", {"messages": turns("q1", "a1"), **UNUSED_COLUMNS}, "'tools' (3), 'think' (3)"),
    ],
)
def test_what_a_template_does_not_use_is_named_once(template, row, expected, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES[template]
    task, examples = examples_of("causal-lm(data=chat)", [row] * 3, tmp_path)
    (line,) = task.remarks(task.encode(examples, Setting(tokenizer, 99), labelled=True))
    assert line == f"keys and columns that the chat template does not use: {expected}"

"""What all tasks share: specs, other names, registration, padding and batches."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from transformers import AutoTokenizer

from adapterhub.data.examples import Example
from adapterhub.data.options import PREDICT, DataOptions
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks import TASKS, dump_task, parse_task, task_class
from adapterhub.tasks.common.base import ALIASES, aliases_of, resolve_alias
from adapterhub.tasks.common.batches import pad

STEPS = ["example", "row", "prediction", "metrics"]


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_spec_is_its_own_normal_form(name):
    task = TASKS[name]()
    assert parse_task(name) == parse_task({name: {}}) == parse_task(dump_task(task)) == task
    assert parse_task(task) is task


def test_each_file_describes_its_data_in_the_same_order():
    files = {sys.modules[task.__module__] for task in TASKS.values()}
    assert len(files) > 8
    for module in files:
        lines = [line.split(maxsplit=1) for line in module.__doc__.splitlines()]
        words = [line[0] for line in lines if line and line[0] in STEPS]
        assert words == STEPS, module.__name__


ANSWERS = {"text": ["b"], "answer_start": [0]}
ROWS = [
    ("classification", {"text": "a", "label": "x"}, "text"),
    ("classification", {"text": "a", "pair": "b", "label": "x"}, "pair"),
    ("multi-label", {"text": "a", "label": ["x"]}, "text"),
    ("multi-label", {"text": "a", "pair": "b", "label": ["x"]}, "pair"),
    ("regression", {"text": "a", "label": 1}, "text"),
    ("tagging", {"text": ["a"], "label": ["O"]}, "text"),
    ("question-answering", {"text": "a", "pair": "b", "label": ANSWERS}, "text"),
    ("question-answering(unanswerable=true)",
     {"text": "a", "pair": "b", "label": {"text": [], "answer_start": []}}, "pair"),
    ("seq2seq", {"text": "a", "label": "b"}, "text"),
    ("seq2seq", {"text": "a", "label": "b"}, "label"),
    ("unified-qa", {"text": "a", "pair": "b", "label": "c"}, "text"),
    ("unified-qa", {"text": "a", "pair": "b", "label": "c"}, "label"),
    ("causal-lm", {"text": "a", "label": "b"}, "text"),
    ("causal-lm", {"text": "a", "label": "b"}, "label"),
    ("multiple-choice", {"text": "a", "choices": ["b", "c"], "label": "A"}, "text"),
    ("multiple-choice", {"text": "a", "choices": ["b", "c"], "label": "A"}, "choices"),
    ("embedding", {"text": "a", "pair": "b"}, "text"),
    ("embedding", {"text": "a", "pair": "b"}, "pair"),
    ("reranking", {"text": "a", "pair": "b", "label": 1}, "text"),
    ("reranking", {"text": "a", "pair": "b", "label": 1}, "pair"),
    ("preference", {"prompt": "a", "chosen": "b", "rejected": "c"}, "prompt"),
    ("preference", {"prompt": "a", "chosen": "b", "rejected": "c"}, "rejected"),
    ("grpo", {"prompt": "a", "answer": "b"}, "prompt"),
    ("grpo", {"prompt": "a", "answer": "b"}, "answer"),
    ("reward", {"prompt": "a", "chosen": "b", "rejected": "c"}, "prompt"),
    ("reward", {"prompt": "a", "chosen": "b", "rejected": "c"}, "rejected"),
    ("prompted(template='{text} {mask}', words={'x': 'a', 'y': 'b'})",
     {"text": "a", "label": "x"}, "text"),
]  # fmt: skip
RAW = {"masked-lm", "span-corruption", "denoising"}  # raw text: an empty row has no tokens to learn


def test_every_task_is_among_the_rows():
    files = {name for name, task in TASKS.items() if task.decodes}
    assert {task.partition("(")[0] for task, _, _ in ROWS} | RAW | files == TASKS.keys()


@pytest.mark.parametrize(("task", "row", "column"), ROWS)
@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_text_is_refused_where_it_would_be_learned(tmp_path, task, row, column, value):
    source, options = tmp_path / "a.jsonl", DataOptions(pair="pair" if "pair" in row else None)
    empty = {list: [value, "c"] if column == "choices" else [], str: value}[type(row[column])]
    source.write_text(json.dumps(row) + "\n" + json.dumps(row | {column: empty}))
    with pytest.raises(DataError, match=r"line 2: .*is empty"):
        parse_task(task).read(str(source), options, "train")
    if column in ("pair", "text") and isinstance(empty, str):
        parse_task(task).read(str(source), options, "eval", labelled=False)


LINES = ["a good film", "", "a bad plot", "", ""]  # the last one ends in a line feed too
BLANK_LINES = {  # tables of one column: a blank line is a row, as on standard input
    "plain.txt": "\n".join(LINES) + "\n",
    "carriage.txt": "\r\n".join(LINES) + "\r\n",
    "one.csv": "text\n" + "\n".join(LINES) + "\n",
    "quoted.csv": '\n"text"\n' + "\n".join(f'"{line}"' if line else "" for line in LINES) + "\n",
    "one.tsv": "text\n" + "\n".join(LINES) + "\n",
}
NO_ROWS = {  # the blank lines are none: the file, and the number of the first blank line
    "two.csv": ("text,label\na good film,1\n\na bad plot,0\n\n\n", 3),
    "two.tsv": ("text\tlabel\na good film\t1\n\na bad plot\t0\n\n\n", 3),
    "rows.jsonl": ('{"text": "a good film"}\n\n{"text": "a bad plot"}\n\n\n', 2),
}
OF_ONE_TEXT = ("classification", "regression", "multi-label", "seq2seq", "causal-lm",
               "causal-lm(data=text)", "embedding", *sorted(RAW))  # fmt: skip


@pytest.mark.parametrize("spec", OF_ONE_TEXT)
def test_each_line_to_predict_on_is_a_row_or_is_named(tmp_path, spec):
    task = parse_task(spec)
    for name, text in (BLANK_LINES | {name: text for name, (text, _) in NO_ROWS.items()}).items():
        file, lines = tmp_path / name, LINES if name in BLANK_LINES else [LINES[0], LINES[2]]
        file.write_bytes(text.encode())
        _, choice = task.fitted(str(file), DataOptions(), PREDICT, labelled=False)
        read = task.read(str(file), choice.options, PREDICT, labelled=False)
        assert [task.shown(each) for each in read] == [[line] for line in lines], name
        counted = [note for note in choice.notes if "blank lines" in note]
        if name in BLANK_LINES:
            assert not counted
        else:
            first = NO_ROWS[name][1]
            assert counted[0].endswith(f": {first}, {first + 2}, {first + 3}"), name


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_matches_the_tokenizer(backbones, side):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"), padding_side=side)
    texts = ["the movie was very good", "a film"]
    rows = [dict(tokenizer(text)) for text in texts]
    expected = tokenizer(texts, padding=True, return_tensors="pt")
    padded = pad(rows, tokenizer)
    assert padded.keys() == expected.keys()
    assert all(torch.equal(padded[key], expected[key]) for key in expected)


def test_only_prompts_take_few_shot_examples():
    with pytest.raises(ConfigError, match="takes no few-shot examples"):
        parse_task("classification").with_shots([Example("a film", None, "pos")], 1, seed=0)


def test_each_alias_is_a_task_with_its_options():
    assert len(ALIASES) > 30
    assert not ALIASES.keys() & TASKS.keys()
    for alias, (name, options) in ALIASES.items():
        task = parse_task(alias)
        assert task.name == name
        assert {key: getattr(task, key) for key in options} == options
        assert alias in aliases_of(name)


@pytest.mark.parametrize(
    ("spec", "normal"),
    [
        ("qa", "question-answering"),
        ("NER", "tagging"),
        ("question_answering(stride=32)", "question-answering(stride=32)"),
        ("summarization(beams=4)", "seq2seq(metric=rouge, beams=4)"),
        ("translation(metric=exact)", "seq2seq(metric=exact)"),
        ({"chat": {"pack": True}}, "causal-lm(data=chat, pack=true)"),
    ],
)
def test_the_normal_form_has_the_name_of_the_task(spec, normal):
    assert dump_task(parse_task(spec)) == dump_task(parse_task(normal))


def test_an_unknown_name_suggests_names_and_aliases():
    assert resolve_alias("classification") == ("classification", {})
    assert task_class("sft") is TASKS["causal-lm"]
    with pytest.raises(ConfigError, match=r"did you mean 'summarization'") as error:
        parse_task("sumarization")
    assert "summarization" not in error.value.expected
    assert "seq2seq" in error.value.expected

"""What all tasks share: specs, registration, padding and batches."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from fixtures import word_tokenizer
from transformers import AutoTokenizer

from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks import TASKS, Setting, dump_task, parse_task
from adapterhub.tasks._base import Encoded
from adapterhub.tasks._forward import by_length
from adapterhub.tasks._rows import cut_text, in_order, pad

STEPS = ["example", "row", "prediction", "metrics"]


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_spec_is_its_own_normal_form(name):
    task = TASKS[name]()
    assert parse_task(name) == parse_task({name: {}}) == parse_task(dump_task(task)) == task
    assert parse_task(task) is task


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("sequence2seq", "'seq2seq'"),
        ("seq2seq(metrics=bleu)", "seq2seq.metrics is not an option; did you mean 'metric'"),
        ("seq2seq, causal-lm", "invalid task spec"),
        ("seq2seq(", "invalid task spec"),
        ({"seq2seq": 3}, "invalid task spec"),
    ],
)
def test_a_spec_that_cannot_be_read(spec, expected):
    with pytest.raises(ConfigError) as error:
        parse_task(spec)
    assert expected in str(error.value)


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


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_matches_the_tokenizer(backbones, side):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"), padding_side=side)
    texts = ["the movie was very good", "a film"]
    rows = [dict(tokenizer(text)) for text in texts]
    expected = tokenizer(texts, padding=True, return_tensors="pt")
    padded = pad(rows, tokenizer)
    assert padded.keys() == expected.keys()
    assert all(torch.equal(padded[key], expected[key]) for key in expected)


def test_a_text_is_cut_between_tokens(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    assert cut_text("the movie was good", tokenizer, 2) == "the movie"
    assert cut_text("the movie", tokenizer, 9) == "the movie"


def test_rows_of_similar_length_share_a_batch():
    rows = [{"input_ids": [1] * length} for length in (5, 1, 4, 2, 3)]
    data = Encoded(parse_task("tagging"), Setting(word_tokenizer(), 8), (), rows, ())
    assert [indices for indices in by_length(data, 2)] == [[1, 3], [4, 2], [0]]
    assert in_order({1: "b", 0: "a"}) == ["a", "b"]


def test_only_prompts_take_few_shot_examples():
    with pytest.raises(ConfigError, match="takes no few-shot examples"):
        parse_task("classification").with_shots([Example("a film", None, "pos")], 1, seed=0)

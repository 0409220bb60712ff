"""What all tasks share: specs, other names, registration, and rows without a text."""

import pytest
import torch
from transformers import AutoTokenizer

from adapterhub.data.examples import Example
from adapterhub.data.options import PREDICT, DataOptions
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks import TASKS, dump_task, parse_task, task_class
from adapterhub.tasks.common.base import resolve_alias
from adapterhub.tasks.common.batches import pad
from tests.kit.data import write_json_lines


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_spec_is_its_own_normal_form(name):
    task = TASKS[name]()
    assert parse_task(name) == parse_task({name: {}}) == parse_task(dump_task(task)) == task
    assert parse_task(task) is task


# A row of each task, and the columns whose text may not be empty.
PAIR, COMPARED = {"text": "a", "pair": "b"}, {"prompt": "a", "chosen": "b", "rejected": "c"}
CHOICES = {"text": "a", "choices": ["b", "c"], "label": "A"}
PROMPTED = "prompted(template='{text} {mask}', words={'x': 'a', 'y': 'b'})"
ANSWER, NONE = {"text": ["b"], "answer_start": [0]}, {"text": [], "answer_start": []}
ROWS = [
    ("classification", {"text": "a", "label": "x"}, "text"),
    ("classification", PAIR | {"label": "x"}, "pair"),
    ("multi-label", PAIR | {"label": ["x"]}, "text pair"),
    ("regression", {"text": "a", "label": 1}, "text"),
    ("tagging", {"text": ["a"], "label": ["O"]}, "text"),
    ("question-answering", PAIR | {"label": ANSWER}, "text"),
    ("question-answering(unanswerable=true)", PAIR | {"label": NONE}, "pair"),
    ("seq2seq", {"text": "a", "label": "b"}, "text label"),
    ("unified-qa", PAIR | {"label": "c"}, "text label"),
    ("causal-lm", {"text": "a", "label": "b"}, "text label"),
    ("multiple-choice", CHOICES, "text choices"),
    ("embedding", PAIR, "text pair"),
    ("reranking", PAIR | {"label": 1}, "text pair"),
    ("preference", COMPARED, "prompt rejected"),
    ("grpo", {"prompt": "a", "answer": "b"}, "prompt answer"),
    ("reward", COMPARED, "prompt rejected"),
    (PROMPTED, {"text": "a", "label": "x"}, "text"),
]
RAW = {"masked-lm", "span-corruption", "denoising"}  # raw text: an empty row has no tokens to learn


def test_every_task_is_among_the_rows():
    files = {name for name, task in TASKS.items() if task.decodes}
    assert {task.partition("(")[0] for task, _, _ in ROWS} | RAW | files == TASKS.keys()


@pytest.mark.parametrize(("task", "row", "columns"), ROWS)
@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_text_is_refused_where_it_would_be_learned(tmp_path, task, row, columns, value):
    options = DataOptions(pair="pair" if "pair" in row else None)
    for column in columns.split():
        empty = {list: [value, "c"] if column == "choices" else [], str: value}[type(row[column])]
        source = str(write_json_lines(tmp_path / "a.jsonl", [row, row | {column: empty}]))
        with pytest.raises(DataError, match=r"line 2: .*is empty"):
            parse_task(task).read(source, options, "train")
        if column in ("pair", "text") and isinstance(empty, str):
            parse_task(task).read(source, options, "eval", labelled=False)


LINES = ["a good film", "", "a bad plot", "", ""]  # the last one ends in a line feed too
TEXT = "\n".join(LINES) + "\n"
QUOTED = "\n".join(f'"{line}"' if line else "" for line in LINES)
FILES = {  # the text of each, and the number of the first blank line that is no row
    # In tables of one column, a blank line is a row, as on standard input.
    "plain.txt": (TEXT, None),
    "carriage.txt": (TEXT.replace("\n", "\r\n"), None),
    "one.csv": (f"text\n{TEXT}", None),
    "quoted.csv": (f'\n"text"\n{QUOTED}\n', None),
    "one.tsv": (f"text\n{TEXT}", None),
    # In others it is none.
    "two.csv": ("text,label\na good film,1\n\na bad plot,0\n\n\n", 3),
    "two.tsv": ("text\tlabel\na good film\t1\n\na bad plot\t0\n\n\n", 3),
    "rows.jsonl": ('{"text": "a good film"}\n\n{"text": "a bad plot"}\n\n\n', 2),
}
OF_ONE_TEXT = ("classification", "regression", "multi-label", "seq2seq", "causal-lm",
               "causal-lm(data=text)", "embedding", *sorted(RAW))  # fmt: skip


@pytest.mark.parametrize("spec", OF_ONE_TEXT)
def test_each_line_to_predict_on_is_a_row_or_is_named(tmp_path, spec):
    task = parse_task(spec)
    for name, (text, first) in FILES.items():
        (tmp_path / name).write_bytes(text.encode())
        _, choice = task.fitted(str(tmp_path / name), DataOptions(), PREDICT, labelled=False)
        read = task.read(str(tmp_path / name), choice.options, PREDICT, labelled=False)
        lines = [line for line in LINES if line or not first]
        assert [task.shown(each) for each in read] == [[line] for line in lines], name
        counted = [note for note in choice.notes if "blank lines" in note]
        if first:
            assert counted[0].endswith(f": {first}, {first + 2}, {first + 3}"), name
        else:
            assert not counted


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_matches_the_tokenizer(backbones, side):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"), padding_side=side)
    texts = ["the movie was very good", "a film"]
    expected = tokenizer(texts, padding=True, return_tensors="pt")
    padded = pad([dict(tokenizer(text)) for text in texts], tokenizer)
    assert padded.keys() == expected.keys()
    assert all(torch.equal(padded[key], expected[key]) for key in expected)


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
    with pytest.raises(ConfigError, match="takes no few-shot examples"):
        parse_task("classification").with_shots([Example("a film", None, "pos")], 1, seed=0)

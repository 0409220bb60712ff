"""Streamed examples: read by every task, with labels that are found or given."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adapterhub.data.examples import data_hash
from adapterhub.data.options import DataOptions
from adapterhub.data.row_stream import BlockReader, Cursor
from adapterhub.data.tables import read_table
from adapterhub.errors import ConfigError, DataError
from adapterhub.recipe.recipe import Recipe, read
from adapterhub.tasks import Setting, parse_task
from adapterhub.training import stream as streams
from adapterhub.training.run_data import read_data
from adapterhub.training.stream import open_examples, stream_rows
from tests.kit.data import word_tokenizer, write_json_lines, write_shards
from tests.kit.task_cases import CASES

ANSWERED = [
    {"question": "what", "context": "so it was", "answers": {"text": ["so"], "answer_start": [0]}}
] * 25
MEDIA = {"image-classification", "audio-classification", "speech-recognition", "image-text-to-text"}
CLASSES = parse_task("classification")


def test_it_reads_what_is_read_without_a_stream(tmp_path: Path) -> None:
    write_shards(tmp_path)
    file = str(tmp_path / "part-2.parquet")
    stream, notes = open_examples(file, DataOptions(), CLASSES)
    assert list(stream) == CLASSES.read(file, stream.options, "train")
    assert notes == (f"{file}: streamed from 1 shard; columns: text, label",)
    assert stream[:3] == list(stream)[:3]
    assert data_hash(stream) == stream.sha256
    # The first rows of many files, to evaluate on.
    several, _ = open_examples(str(tmp_path / "part-*.parquet"), DataOptions(), CLASSES, "eval")
    assert len(list(islice(several, 7))) == 7
    assert len(list(several)) == 64


@pytest.mark.parametrize("name", sorted(CASES.keys() - MEDIA))
def test_every_task_reads_a_stream(name: str, tmp_path: Path) -> None:
    """All tasks but those on files, whose names are relative to the folder of their table."""
    task, file = parse_task(CASES[name].task), str(CASES[name].data(tmp_path))
    if name == "question-answering":  # its case is a SQuAD file, which is one value of JSON
        file = str(write_json_lines(tmp_path / "rows.jsonl", ANSWERED))
    table = read_table(file, DataOptions(), "train")
    columns = {column: pa.array(list(table.column(column))) for column in table.columns}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=5)
    source = str(tmp_path / "rows.parquet")
    stream, _ = open_examples(str(tmp_path / "row?.parquet"), DataOptions(), task)
    whole = stream.task.read(source, stream.options, "train")
    blocks = stream.blocks(BlockReader(10), Cursor())
    found: list[object] = []
    while len(found) < len(whole):
        found += next(blocks)[1]
    assert found == whole
    assert stream.labels() == stream.task.labels(whole)


def streamed(file: object, **options: object) -> Any:
    return open_examples(str(file), DataOptions(**options), CLASSES)[0]


def test_labels_that_appear_late_are_found(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": str(n // 500)} for n in range(6000)]
    stream = streamed(write_json_lines(tmp_path / "rows.jsonl", rows))
    assert stream.labels() == tuple(str(n) for n in range(12))


def test_invalid_rows_are_named_and_empty_ones_skipped(tmp_path: Path) -> None:
    """Also a whole block of them."""
    table = pa.table({"text": ["good"] * 300, "label": ["a"] * 299 + [None]})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError) as error:
        list(streamed(tmp_path / "rows.parquet"))
    assert error.value.offenders == ("row 300 of rows.parquet: the label is empty",)
    texts = ["good"] * 10 + [""] * 20 + ["bad"] * 3
    rows = [{"text": text, "label": "a"} for text in texts]
    file = write_json_lines(tmp_path / "rows.jsonl", rows)
    blocks = streamed(file, skip_empty=True).blocks(BlockReader(10), Cursor())
    assert [len(next(blocks)[1]) for _ in range(5)] == [10, 0, 0, 3, 10]
    with pytest.raises(DataError, match="invalid rows"):
        list(streamed(file))


def messages(*roles_and_texts: str) -> dict[str, object]:
    pairs = zip(roles_and_texts[::2], roles_and_texts[1::2], strict=True)
    return {"messages": [{"role": role, "content": text} for role, text in pairs]}


SAID = messages("user", "a", "assistant", "b")
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
# Task -> a good row, a bad one, and what is said of it.
BAD_ROWS = {
    "causal-lm": ({"prompt": "a", "response": "b"}, {"prompt": "a", "response": " "}, "is empty"),
    "causal-lm(data=chat)": (SAID, messages("user", "a", "assistant", ""), "is empty"),
    "causal-lm(data=chat) ": (SAID, messages("user", "a"), "not the assistant's"),
    "seq2seq": ({"text": "a", "target": "b"}, {"text": "a", "target": None}, "is missing"),
    "reward": (PAIR, PAIR | {"rejected": ""}, "is empty"),
    "masked-lm": ({"text": "a"}, {"text": None}, "is missing"),
    "embedding": ({"anchor": "a", "positive": "b"}, {"anchor": "", "positive": "b"}, "is empty"),
    "classification": (
        {"text": "a", "label": "x"}, {"text": "a", "label": "z"}, "labels without a name"),
}  # fmt: skip


def with_bad_row(folder: Path, task: str) -> Recipe:
    """Return the recipe of 310 rows of which number 302 is bad, and the labels are given."""
    good, bad, _ = BAD_ROWS[task]
    rows = [*[good] * 301, bad, *[good] * 8]
    write_json_lines(folder / "rows.jsonl", rows)
    data = {"train": str(folder / "*.jsonl"), "eval": "none", "stream": True}
    words = ["train.max_steps=9", *["data.labels=x,y"] * (task == "classification")]
    return read(None, words, {"task": task.strip(), "backbone": "x", "output": "o", "data": data})


@pytest.mark.parametrize("task", list(BAD_ROWS))
def test_a_bad_row_is_found_before_the_backbone_is_loaded(task, tmp_path, monkeypatch) -> None:
    """Or, in files beyond a size, when it is drawn."""
    recipe = with_bad_row(tmp_path, task)
    with pytest.raises(DataError, match=r"invalid rows|without a name") as error:
        read_data(recipe)
    assert "302" in str(error.value) or task == "classification"
    assert BAD_ROWS[task][2] in str(error.value)
    if task != "classification":
        monkeypatch.setattr(streams, "_READ_THROUGH", 100)
        with pytest.raises(DataError, match=r"row 302 of rows\.jsonl"):
            list(read_data(recipe).train)


def test_a_chat_that_the_template_refuses_is_found_before_the_first_step(tmp_path: Path) -> None:
    rows = [messages("user", "a", "assistant", "b")] * 301
    rows += [messages("system", "be kind", "user", "hello there", "assistant", "b")]
    file = str(write_json_lines(tmp_path / "rows.jsonl", rows))
    stream, _ = open_examples(file, DataOptions(), parse_task("causal-lm"))
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m.role ~ ' ' ~ m.content ~ ' ' }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="no system") as error:
        stream_rows(stream, stream.task, Setting(tokenizer, 16))
    assert error.value.offenders == ("the chat that begins with 'be kind'",)

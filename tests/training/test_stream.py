"""Streams: their examples and labels, and batches that are the same after a kill."""

import json
import os
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from adapterhub.cli import main
from adapterhub.data.examples import data_hash
from adapterhub.data.options import DataOptions
from adapterhub.data.row_stream import BlockReader, Cursor
from adapterhub.data.tables import read_table
from adapterhub.errors import ConfigError, DataError
from adapterhub.files.native import Saved
from adapterhub.inference.open import open_adapter
from adapterhub.loop.report import Reporter
from adapterhub.recipe.recipe import read
from adapterhub.tasks import Setting, parse_task
from adapterhub.training import stream as streams
from adapterhub.training.plan import plan_of, preview_rows
from adapterhub.training.run import PreparedRun, prepare, run
from adapterhub.training.run_data import read_data
from adapterhub.training.stream import StreamBatches, open_examples, stream_rows
from tests.kit import data, processes, tiny_models
from tests.kit.data import sentences, streamed_recipe, write_json_lines, write_shards, write_tsv
from tests.kit.runs import Notes, final_bytes, forks, killed, quiet
from tests.kit.task_cases import CASES

ANSWERED = [
    {"question": "what", "context": "so it was", "answers": {"text": ["so"], "answer_start": [0]}}
] * 25
MEDIA = {"image-classification", "audio-classification", "speech-recognition", "image-text-to-text"}
CLASSES = parse_task("classification")


@pytest.mark.parametrize("name", sorted(CASES.keys() - MEDIA))
def test_every_task_reads_a_stream(name, tmp_path):
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


def test_labels_appear_late_invalid_rows_are_named_and_empty_ones_skipped(tmp_path):
    """Also a whole block of them."""
    rows = [{"text": "a", "label": str(n // 500)} for n in range(6000)]
    stream = streamed(write_json_lines(tmp_path / "late.jsonl", rows))
    assert stream.labels() == tuple(str(n) for n in range(12))
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


def messages(**texts: str) -> dict[str, object]:
    return {"messages": [{"role": role, "content": text} for role, text in texts.items()]}


SAID = messages(user="a", assistant="b")
# Task -> a good row, a bad one, and what is said of it.
BAD_ROWS = {
    "causal-lm": ({"prompt": "a", "response": "b"}, {"prompt": "a", "response": " "}, "is empty"),
    "causal-lm(data=chat)": (SAID, messages(user="a", assistant=""), "is empty"),
    "causal-lm(data=chat) ": (SAID, messages(user="a"), "not the assistant's"),
    "masked-lm": ({"text": "a"}, {"text": None}, "is missing"),
    "embedding": ({"anchor": "a", "positive": "b"}, {"anchor": "", "positive": "b"}, "is empty"),
    "classification": (
        {"text": "a", "label": "x"}, {"text": "a", "label": "z"}, "labels without a name"),
}  # fmt: skip


@pytest.mark.parametrize("task", list(BAD_ROWS))
def test_a_bad_row_is_found_before_the_backbone_is_loaded(task, tmp_path, monkeypatch):
    """Or, in files beyond a size, when it is drawn. The labels of classes are given."""
    good, bad, said = BAD_ROWS[task]
    write_json_lines(tmp_path / "rows.jsonl", [*[good] * 301, bad, *[good] * 8])
    data = {"train": str(tmp_path / "*.jsonl"), "eval": "none", "stream": True}
    words = ["train.max_steps=9", *["data.labels=x,y"] * (task == "classification")]
    flags = {"task": task.strip(), "backbone": "x", "output": "o", "data": data}
    recipe = read(None, words, flags)
    with pytest.raises(DataError, match=r"invalid rows|without a name") as error:
        read_data(recipe)
    assert "302" in str(error.value) or task == "classification"
    assert said in str(error.value)
    if task != "classification":
        monkeypatch.setattr(streams, "_READ_THROUGH", 100)
        with pytest.raises(DataError, match=r"row 302 of rows\.jsonl"):
            list(read_data(recipe).train)


@pytest.fixture
def shards(tmp_path: Path) -> str:
    return write_shards(tmp_path / "data")


def batches_of(prepared: PreparedRun, **more: Any) -> StreamBatches:
    return StreamBatches(prepared.train, prepared.options, buffer=16, **more)


def content(batch: Any) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in sorted(batch.items())}


def texts(batch: Any) -> list[tuple[int, ...]]:
    """Return what identifies the rows of a batch: their tokens without padding."""
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [tuple(ids[mask.bool()].tolist()) for ids, mask in pairs]


@pytest.mark.parametrize(
    ("task", "words"), [("classification", ()), ("masked-lm", ("data.label=null",))]
)
def test_a_place_that_was_saved_gives_the_same_batches(backbone, tmp_path, shards, task, words):
    prepared = prepare(streamed_recipe(backbone, tmp_path / "run", shards, f"task={task}", *words))
    whole = batches_of(prepared)
    drawn, states, found = [], [], set()
    for number in range(40):  # more than two passes over 64 rows
        states.append(json.loads(json.dumps(whole.state())))
        drawn.append(content(batch := whole[number]))
        if task == "classification":
            found.update(zip(texts(batch), batch["labels"].tolist(), strict=True))
    assert len({str(batch) for batch in drawn}) > 30
    if task == "classification":  # rows are encoded as without a stream
        train = prepared.train
        rows = train.task.encode(list(train.examples), train.setting, labelled=True).rows
        assert found == {(tuple(row["input_ids"]), row["labels"]) for row in rows}
    for start in (0, 1, 4, 15, 16, 17, 33):
        resumed = batches_of(prepared)
        resumed.load_state(states[start])
        assert [content(resumed[n]) for n in range(start, 40)] == drawn[start:]


@pytest.mark.apart
def test_workers_give_the_same_batches_and_places(backbone, tmp_path, shards):
    prepared = prepare(streamed_recipe(backbone, tmp_path / "run", shards))
    alone, helped = batches_of(prepared), batches_of(prepared, workers=2)
    torch.manual_seed(5)
    random = torch.get_rng_state()
    for number in range(20):
        assert content(alone[number]) == content(helped[number])
        assert alone.state() == helped.state()
    helped.close()
    assert torch.equal(torch.get_rng_state(), random), "dropout would differ after a resume"


@forks
def test_killed_and_resumed_gives_the_same_bytes(backbone, tmp_path, shards):
    dev = write_tsv(tmp_path / "dev.tsv", sentences(12))
    options = ("train.save_every=3", "train.eval_every=4", "train.dropout=true",
               "train.gradient_accumulation=3")  # fmt: skip
    whole, cut = (
        streamed_recipe(backbone, tmp_path / name, shards, *options, eval=str(dev))
        for name in ("whole", "cut")
    )
    run(whole, quiet(whole))
    killed(lambda: run(cut, Notes(7, signal.SIGKILL)))
    last = tmp_path / "cut" / "checkpoints" / "last" / "progress.json"
    assert json.loads(last.read_text())["progress"]["step"] in (6, 8)
    outcome = run(cut, quiet(cut), resume=True)
    assert final_bytes(tmp_path / "cut")[:2] == final_bytes(tmp_path / "whole")[:2]
    record = Saved.at(outcome.folder).manifest.training
    assert (record["data"]["eval"], record["recipe"]["data"]["stream"]) == (12, True)
    assert open_adapter(outcome.folder).setting.labels == ("neg", "pos")


def train_and_record() -> None:
    """Run the command line in this process, and write the rows of each batch that it draws."""
    draw = StreamBatches.__getitem__

    def recorded(self: StreamBatches, index: int) -> Any:
        batch = draw(self, index)
        with open(f"{os.environ['DRAWN']}-{os.environ['RANK']}", "a") as file:
            for ids in texts(batch):
                print(self.place.cursor.turn, ids, file=file)
        return batch

    StreamBatches.__getitem__ = recorded  # type: ignore[method-assign]
    main()


@pytest.mark.apart
def test_two_launched_processes_share_the_rows_and_resume(backbone, tmp_path, shards):
    """Each process records what it draws; a longer run of the same rows goes on from the place."""
    steady = tmp_path / "steady"  # without dropout, of which each process has its own
    tiny_models.model("bert", "features", **tiny_models.NO_DROPOUT).save_pretrained(steady)
    AutoTokenizer.from_pretrained(backbone).save_pretrained(steady)

    def launch(name: str, *words: str) -> list[list[str]]:
        drawn = tmp_path / f"drawn-{name}"
        done = processes.run(
            __file__, "train", "--backbone", steady, "--train", shards, "--eval", "none",
            "--method", "lora(rank=2)", "data.stream=true", "data.buffer=16",
            "train.batch_size=4", "train.schedule=constant", "train.warmup=0",
            "train.tensorboard=false", "train.report=false", "dtype=fp32", "attention=eager",
            *words, processes=2, environment={"DRAWN": str(drawn)},
        )  # fmt: skip
        assert done.returncode == 0, done.printed[-3000:]
        return [Path(f"{drawn}-{rank}").read_text().splitlines() for rank in range(2)]

    whole = launch("whole", "--output", str(tmp_path / "whole"), "--steps", "10")
    passes = [[line.split(" ", 1)[1] for line in own if line.startswith("0 ")] for own in whole]
    assert not {*passes[0]} & {*passes[1]}
    launch("cut", "--output", str(tmp_path / "cut"), "--steps", "6")
    both = launch("cut", "--output", str(tmp_path / "cut"), "--steps", "10", "--resume")
    assert both == whole
    tensors = [
        load_file(tmp_path / name / "checkpoints/last/adapter/adapter.safetensors")
        for name in ("cut", "whole")
    ]
    torch.testing.assert_close(tensors[0], tensors[1], atol=1e-7, rtol=1e-6)


def test_packed_rows_and_balanced_classes(backbones, tmp_path, shards):
    """Several texts are in a row, and the classes of all rows are counted."""
    words = ("task=causal-lm(data=text, pack=true)", "train.max_length=32", "data.label=null")
    prepared = prepare(streamed_recipe(backbones("llama"), tmp_path / "run", shards, *words))
    assert batches_of(prepared)[0]["input_ids"].shape[1] > 20
    word = "task=classification(class_weights=balanced)"
    recipe = streamed_recipe(backbones("bert"), tmp_path / "run", shards, word)
    prepared = prepare(recipe)
    counts = prepared.train.task.label_counts(prepared.train)
    assert sum(counts.values()) == 64
    assert prepared.own_loss is not None
    # The plan and the preview read only the beginning.
    plan = plan_of(prepared)
    assert (plan.steps, plan.steps_per_epoch) == (12, 12)
    rows, notes = preview_rows(recipe, 2)
    assert len(rows) == 2
    assert any("streamed from 3 shards" in note for note in notes)


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("train.max_steps=null", "train.max_steps is missing"),
        ("train.epochs=2", "train.epochs is set"),
        ("data.eval=null", "data.eval is missing"),
        ("data.rows=5", "data.rows is set"),
        ("task=preference", "compares with a reference"),
    ],
)
def test_what_a_stream_does_not_go_with_is_told(backbone, tmp_path, shards, word, problem):
    recipe = streamed_recipe(backbone, tmp_path / "run", shards, word)
    with pytest.raises(ConfigError) as error:
        run(recipe, Reporter())
    assert [problem in line for line in error.value.offenders] == [True]
    assert not (tmp_path / "run").exists()


if __name__ == "__main__":
    train_and_record()


def test_a_chat_that_the_template_refuses_is_found_before_the_first_step(tmp_path):
    rows = [*[SAID] * 301, messages(system="be kind", user="hello there", assistant="b")]
    file = str(write_json_lines(tmp_path / "rows.jsonl", rows))
    stream, _ = open_examples(file, DataOptions(), parse_task("causal-lm"))
    tokenizer = data.word_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m.role ~ ' ' ~ m.content ~ ' ' }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="no system") as error:
        stream_rows(stream, stream.task, Setting(tokenizer, 16))
    assert error.value.offenders == ("the chat that begins with 'be kind'",)


def test_it_reads_what_is_read_without_a_stream(tmp_path):
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

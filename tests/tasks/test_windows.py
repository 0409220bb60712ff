"""Rows of streamed text: whole, without padding, by the seed and the epoch, and resumable."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adapterhub as ah
from adapterhub.data.options import DataOptions
from adapterhub.data.text_stream import open_stream
from adapterhub.errors import ConfigError
from adapterhub.files.native import Saved
from adapterhub.loop.report import Reporter
from adapterhub.recipe.recipe import read
from adapterhub.tasks import TASKS, Setting, parse_task
from adapterhub.tasks.common.packing import STARTS_WORD, Frame, Windows
from adapterhub.training.run import run
from tests.kit.data import WORDS, word_tokenizer
from tests.kit.runs import Notes, adapter_bytes

STREAMED = {
    "masked-lm": ("bert", "masked-lm"),
    "causal-lm": ("gpt2", "causal-lm(data=text)"),
    "span-corruption": ("t5", "span-corruption"),
    "denoising": ("bart", "denoising"),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path):
    """Write 60 documents of different lengths."""
    choice = np.random.default_rng(0)
    documents = [" ".join(choice.choice(WORDS, choice.integers(1, 30))) for _ in range(60)]
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    return tmp_path / "text.txt"


def spec_of(name):
    """Return a spec of a task with which it streams, if it can."""
    return STREAMED.get(name, ("", name))[1]


@given(
    st.lists(st.integers(0, 99), min_size=2, max_size=60),
    st.integers(3, 20),
    st.lists(st.integers(100, 104), max_size=1),
)
def test_windows_hold_all_tokens_once(ids, limit, around):
    frame = Frame(before=tuple(around), after=tuple(around))
    tokens = np.array([i | STARTS_WORD * (i % 2) for i in ids], dtype=np.uint32)
    windows = Windows(tokens, frame, limit, lambda ids, starts: {"ids": ids, "starts": starts})
    rows = list(windows)
    inner = [row["ids"][len(around) : len(row["ids"]) - len(around)] for row in rows]
    joined = [i for part in inner for i in part]
    assert joined in (ids, ids[:-1])
    assert [len(row["ids"]) for row in rows] == windows.lengths
    assert all(length == limit for length in windows.lengths[:-1])
    assert rows == [windows[i] for i in range(len(windows))] == windows[:]
    for row in rows:
        odd = [n for n, i in enumerate(row["ids"]) if i % 2 and i < 100]
        assert row["starts"] == odd


@pytest.mark.parametrize("name", STREAMED)
def test_rows_are_full_and_documents_are_separated(name, text, backbones):
    required = {"prompted"}  # has options without a default
    streams = {name for name in TASKS.keys() - required if parse_task(spec_of(name)).streams}
    assert streams == STREAMED.keys(), "each is tested"
    stream, tokenizer = open_stream(str(text), DataOptions()), word_tokenizer()
    encoded = parse_task(spec_of(name)).encode_stream(stream, Setting(tokenizer, 32))
    lengths = [len(row["input_ids"]) for row in encoded.rows]
    assert len(set(lengths[:-1])) == 1
    ids = [i for row in encoded.rows for i in row["input_ids"]]
    words = tokenizer(text.read_text(), add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids)
    assert [i for i in ids if i not in special] == words
    ends = {"masked-lm": 0, "causal-lm": 60, "span-corruption": 60, "denoising": 60}
    assert ids.count(tokenizer.eos_token_id) == ends[name]
    first, again, later = (encoded.batch(range(8), epoch) for epoch in (0, 0, 1))
    assert all(first[key].equal(again[key]) for key in first)
    differs = any(not first[key].equal(later[key]) for key in first)
    assert differs == (name != "causal-lm")


def test_windows_of_a_bert_are_between_its_special_tokens(text, backbones):
    _, tokenizer = ah.load_backbone(str(backbones("bert")), task="masked-lm")
    stream = open_stream(str(text), DataOptions())
    encoded = parse_task("masked-lm").encode_stream(stream, Setting(tokenizer, 16))
    row, flagged = encoded.rows[0], []
    assert len(row["input_ids"]) == 16
    assert row["input_ids"][0] == tokenizer.cls_token_id
    assert row["input_ids"][-1] == tokenizer.sep_token_id
    for each in encoded.rows:
        flagged += [i for i, f in zip(each["input_ids"], each["special"], strict=True) if f]
    assert set(flagged) == {tokenizer.cls_token_id, tokenizer.sep_token_id}
    assert len(flagged) == 2 * len(encoded.rows) + 60, "and one after each document"


def recipe(text, backbone, task, output, **train):
    """Return a recipe that streams."""
    options = {"epochs": 2, "max_length": 16, "batch_size": 4, "report": False} | train
    return read(
        flags={
            "backbone": str(backbone), "task": task, "output": str(output), "train": options,
            "data": {"train": str(text), "stream": True},
        }
    )  # fmt: skip


@pytest.mark.parametrize("name", STREAMED)
def test_a_streamed_run(name, text, backbones, tmp_path):
    architecture, task = STREAMED[name]
    outcome = run(recipe(text, backbones(architecture), task, tmp_path / "run"), Reporter())
    assert 0 < outcome.metrics["loss"] < 50
    record = Saved.at(outcome.folder).manifest.training["data"]
    assert (record["train"], record["eval"]) == (54, 6)


def test_a_streamed_run_resumes_in_the_middle_of_an_epoch(text, backbones, tmp_path):
    """Given evaluation data are streamed, too."""
    (tmp_path / "dev.txt").write_text("the movie was good\n\nthe plot was bad\n\nfine")

    def made(name):
        found = recipe(text, backbones("bert"), "masked-lm", tmp_path / name, save_every=4)
        data = {"eval": str(tmp_path / "dev.txt"), "eval_rows": 2, "rows": 30}
        return replace(found, data=replace(found.data, **data))

    whole = run(made("whole"), Reporter())
    record = Saved.at(whole.folder).manifest.training["data"]
    assert (record["train"], record["eval"]) == (30, 2)
    with pytest.raises(KeyboardInterrupt):
        run(made("cut"), Notes(stop_after=8))
    cut = run(made("cut"), Reporter(), resume=True)
    assert adapter_bytes(tmp_path / "cut") == adapter_bytes(tmp_path / "whole")
    assert cut.metrics == whole.metrics


@pytest.mark.parametrize("name", sorted(TASKS.keys() - STREAMED.keys() - {"prompted"}))
def test_another_task_streams_rows_and_needs_to_know_how_many(name, text, backbones, tmp_path):
    with pytest.raises(ConfigError, match=f"data.stream=true with {name}") as error:
        run(recipe(text, backbones("bert"), name, tmp_path / "run"), Reporter())
    assert any("max_steps" in offender for offender in error.value.offenders)
    assert "--steps" in error.value.hint

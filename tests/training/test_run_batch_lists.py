"""The batches of a run: all its rows in an order of each epoch, or drawn of a stream."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapterhub.loop.engine import LazyBatches
from adapterhub.training.run import (
    PreparedRun,
    begun_epochs,
    drawn_batches,
    epoch_batches,
    first_batches,
    prepare,
)
from adapterhub.training.stream import StreamBatches
from tests.kit.data import streamed_recipe, write_shards


def prepared(backbone: Path, tmp_path: Path, *words: str, stream: bool) -> PreparedRun:
    write_shards(tmp_path / "data", (20,))
    source = str(tmp_path / "data" / "part-0.parquet")
    return prepare(streamed_recipe(backbone, tmp_path / "run", source, *words, stream=stream))


def test_an_epoch_of_rows_in_memory(backbone: Path, tmp_path: Path) -> None:
    run = prepared(backbone, tmp_path, stream=False)
    assert drawn_batches(run) is None
    first, second = (epoch_batches(run, epoch) for epoch in (0, 1))
    assert isinstance(first, LazyBatches)
    assert len(first) == 5
    assert begun_epochs(run) == 3  # twelve steps of five
    assert first.order != second.order  # type: ignore[attr-defined]
    assert first.order == epoch_batches(run, 0).order  # type: ignore[attr-defined]


def test_the_epoch_of_a_stream_is_the_run(
    backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(backbone, tmp_path, "train.gradient_accumulation=2", stream=True)
    stream = drawn_batches(run)
    assert isinstance(stream, StreamBatches)
    assert (len(stream), stream.reader.size, stream.workers) == (24, 16, 0)
    assert begun_epochs(run) == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    shared = epoch_batches(run, 0)
    assert isinstance(shared, StreamBatches)
    assert (len(shared), shared.reader.rank, shared.reader.world) == (48, 1, 2)


def test_trying_a_batch_takes_nothing_from_the_run(backbone: Path, tmp_path: Path) -> None:
    run = prepared(backbone, tmp_path, stream=True)
    stream = drawn_batches(run)
    assert stream is not None
    before = stream.state()
    tried = first_batches(run)
    assert stream.state() == before
    assert tried.training[0]["input_ids"].tolist() == stream[0]["input_ids"].tolist()
    assert tried.evaluation == ()

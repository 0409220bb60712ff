"""Preparing a run: data, backbone, adapter, batches and reference, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adapterhub.adapters.activation import virtual_tokens
from adapterhub.backbones.pooling import max_positions
from adapterhub.errors import ConfigError
from adapterhub.inference.open import open_adapter
from adapterhub.loop.engine import LazyBatches
from adapterhub.loop.report import Reporter
from adapterhub.recipe.recipe import read
from adapterhub.training.loading import make_ready
from adapterhub.training.run import (
    PreparedRun,
    begun_epochs,
    drawn_batches,
    epoch_batches,
    first_batches,
    prepare,
    run,
)
from adapterhub.training.stream import StreamBatches
from tests.kit import tiny_models
from tests.kit.data import streamed_recipe, write_json_lines, write_shards
from tests.kit.runs import adapter_bytes
from tests.kit.task_cases import CASES


def test_it_is_ready_and_writes_nothing(recipe_with, tmp_path):
    prepared = prepare(recipe_with("method=lora(rank=2)"))
    assert prepared.data.labels == prepared.adapter.labels == ("neg", "pos")
    assert len(prepared.train.rows) == len(prepared.data.train) == 64
    assert prepared.adapter.metadata.task == "classification"
    assert prepared.model.config.use_cache is False
    assert not (tmp_path / "run").exists()


def test_the_same_seed_gives_the_same_initial_tensors(recipe_with):
    first, second, other = (
        prepare(recipe_with(f"seed={seed}")).adapter.tensors() for seed in (5, 5, 6)
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    ("words", "schedule"),
    [
        (["method=lora"], "linear"),
        (["method=unfreeze"], "slanted"),
        (["method=unfreeze", "train.schedule=cosine"], "cosine"),
    ],
)
def test_the_schedule_and_the_length_are_chosen_and_told(recipe_with, words, schedule):
    prepared = prepare(recipe_with(*words))
    assert prepared.recipe.train.schedule == schedule
    assert prepared.recipe.train.max_length == 64, "the positions of the backbone"
    assert any("train.max_length is" in note for note in prepared.notes)
    longer = prepare(recipe_with(*words, "train.max_length=100000"))
    assert max(longer.train.lengths) <= max_positions(prepared.model) == 64


def flags_of(folder: Path, backbone: Path, file: Path, **more: str) -> dict[str, Any]:
    data = {"train": str(file), "eval": str(file)}
    return {"backbone": str(backbone), "output": str(folder / "run"), "data": data, **more}


def test_packing_is_refused_with_virtual_tokens(backbones, tmp_path):
    file = write_json_lines(tmp_path / "texts.jsonl", [{"text": "the movie was good"}] * 8)
    task = "causal-lm(data=text, pack=true)"
    flags = flags_of(tmp_path, backbones("llama"), file, method="prompt", task=task)
    with pytest.raises(ConfigError, match="prompt prepends virtual tokens") as error:
        prepare(read(flags=flags))
    assert error.value.hint == "pack=false"


LIMITED = [a for a in tiny_models.MATRIX if "max_position_embeddings" in tiny_models.SIZES[a]]


@pytest.mark.parametrize("architecture", [*LIMITED, "roberta", "mpnet"])
def test_a_row_of_the_longest_length_is_read(architecture):
    assert len(LIMITED) > (20 if tiny_models.FULL_MATRIX else 7)
    model = tiny_models.usual_model(architecture)
    assert max_positions(model) <= 64 < max_positions(tiny_models.model("t5")) == 1 << 30
    inputs = tiny_models.batch(rows=2, length=max_positions(model))
    inputs |= tiny_models.decoder_inputs(model, inputs)
    assert model(**inputs).logits.isfinite().all()


@pytest.mark.parametrize("method", ["prompt(length=5)", "prefix(length=5)", "p-tuning(length=5)"])
def test_virtual_tokens_leave_room_for_the_longest_row(method, backbone, tmp_path):
    file = tmp_path / "long.tsv"
    file.write_text("text\tlabel\n" + ("good " * 90 + "\tpos\nbad " * 90 + "\tneg\n"))
    flags = flags_of(tmp_path, backbone, file, method=method)
    prepared = prepare(read(flags=flags))
    free = max_positions(prepared.model) - virtual_tokens(prepared.adapter)
    assert max(prepared.train.lengths) == prepared.recipe.train.max_length == free
    assert prepared.model(**prepared.train.batch([0, 1])).loss.isfinite()


def test_a_model_that_is_placed_already_stays_where_it_is(monkeypatch):
    model = tiny_models.model("llama", "causal-lm")
    model.hf_device_map = {"": "cpu"}
    monkeypatch.setattr(type(model), "to", lambda *_: pytest.fail("the model was moved"))
    make_ready(model)
    assert model.config.use_cache is False


def prepared(backbone: Path, tmp_path: Path, *words: str, stream: bool) -> PreparedRun:
    write_shards(tmp_path / "data", (20,))
    source = str(tmp_path / "data" / "part-0.parquet")
    return prepare(streamed_recipe(backbone, tmp_path / "run", source, *words, stream=stream))


def test_an_epoch_of_rows_in_memory(backbone, tmp_path):
    run = prepared(backbone, tmp_path, stream=False)
    assert drawn_batches(run) is None
    first, second = (epoch_batches(run, epoch) for epoch in (0, 1))
    assert isinstance(first, LazyBatches)
    assert len(first) == 5
    assert begun_epochs(run) == 3  # twelve steps of five
    assert first.order != second.order  # type: ignore[attr-defined]
    assert first.order == epoch_batches(run, 0).order  # type: ignore[attr-defined]


def test_the_epoch_of_a_stream_is_the_run(backbone, tmp_path, monkeypatch):
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


def test_trying_a_batch_takes_nothing_from_the_run(backbone, tmp_path):
    run = prepared(backbone, tmp_path, stream=True)
    stream = drawn_batches(run)
    assert stream is not None
    before = stream.state()
    tried = first_batches(run)
    assert stream.state() == before
    assert tried.training[0]["input_ids"].tolist() == stream[0]["input_ids"].tolist()
    assert tried.evaluation == ()


WORDS = ("train.tensorboard=false", "train.report=false", "train.learning_rate=1e-2")


@pytest.fixture
def recipe_of(backbones, tmp_path):
    case = CASES["preference"]
    file = str(case.data(tmp_path))

    def recipe(output, *words, **flags):
        flags |= {
            "backbone": str(backbones(case.backbone)), "output": str(tmp_path / output),
            "task": case.task, "data": {"train": file, "eval": file},
        }  # fmt: skip
        return read(None, [*WORDS, *words], flags)

    return recipe


def references(prepared):
    return [row["reference"] for row in prepared.train.rows]


def test_the_reference_of_a_new_and_of_a_started_adapter(recipe_of):
    new = recipe_of("new", "train.max_steps=6", method="lora")
    bare = references(prepare(new))
    outcome = run(new, Reporter())
    evaluated = open_adapter(outcome.folder).evaluate(prepare(new).data.evaluation)
    assert evaluated == pytest.approx(outcome.metrics, abs=1e-4)
    started = prepare(recipe_of("again", **{"from": str(outcome.folder)}))
    assert np.abs(np.array(references(started)) - np.array(bare)).max() > 0.1
    margin = started.data.task.evaluate(started.model, started.evaluation, 64)["margin"]
    assert margin == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_resumed_run_has_the_reference_of_its_start(method, recipe_of):
    half = recipe_of("part", "train.max_steps=4", "train.schedule=constant", method=method)
    run(half, Reporter())
    longer = recipe_of("part", "train.max_steps=8", "train.schedule=constant", method=method)
    run(longer, Reporter(), resume=True)
    alone = recipe_of("alone", "train.max_steps=8", "train.schedule=constant", method=method)
    run(alone, Reporter())
    assert adapter_bytes(longer.output) == adapter_bytes(alone.output)

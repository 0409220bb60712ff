"""Preparing a run: data, backbone and adapter, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapterhub.adapters.activation import virtual_tokens
from adapterhub.backbones.pooling import max_positions
from adapterhub.errors import ConfigError
from adapterhub.recipe.recipe import read
from adapterhub.training.loading import make_ready
from adapterhub.training.run import prepare
from tests.kit import tiny_models


def test_it_is_ready_and_writes_nothing(recipe_with, tmp_path: Path) -> None:
    prepared = prepare(recipe_with("method=lora(rank=2)"))
    assert prepared.data.labels == prepared.adapter.labels == ("neg", "pos")
    assert len(prepared.train.rows) == len(prepared.data.train) == 64
    assert prepared.adapter.metadata.task == "classification"
    assert prepared.model.config.use_cache is False
    assert not (tmp_path / "run").exists()


def test_the_same_seed_gives_the_same_initial_tensors(recipe_with) -> None:
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
def test_the_schedule_is_the_chosen_one_or_the_methods_default(
    recipe_with, words, schedule
) -> None:
    assert prepare(recipe_with(*words)).recipe.train.schedule == schedule


def test_inputs_are_no_longer_than_the_positions_of_the_backbone(recipe_with) -> None:
    prepared = prepare(recipe_with("train.max_length=100000"))
    assert max(prepared.train.lengths) <= max_positions(prepared.model)


def test_packing_is_refused_with_virtual_tokens(backbones, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "the movie was good"}\n' * 8, encoding="utf-8")
    flags = {
        "backbone": str(backbones("llama")),
        "output": str(tmp_path / "run"),
        "method": "prompt",
        "task": "causal-lm(data=text, pack=true)",
        "data": {"train": str(file), "eval": str(file)},
    }
    with pytest.raises(ConfigError, match="prompt prepends virtual tokens") as error:
        prepare(read(flags=flags))
    assert error.value.hint == "pack=false"


def test_a_model_without_position_embeddings_has_no_limit() -> None:
    assert max_positions(tiny_models.model("t5")) == 1 << 30
    assert max_positions(tiny_models.model("bert")) == 64


LIMITED = [a for a in tiny_models.MATRIX if "max_position_embeddings" in tiny_models.SIZES[a]]


@pytest.mark.parametrize("architecture", [*LIMITED, "roberta", "mpnet"])
def test_a_row_of_the_longest_length_is_read(architecture: str) -> None:
    model = tiny_models.usual_model(architecture)
    inputs = tiny_models.batch(rows=2, length=max_positions(model))
    inputs |= tiny_models.decoder_inputs(model, inputs)
    assert model(**inputs).logits.isfinite().all()


def test_the_limited_architectures_are_covered() -> None:
    assert len(LIMITED) > (20 if tiny_models.FULL_MATRIX else 7)


@pytest.mark.parametrize("method", ["prompt(length=5)", "prefix(length=5)", "p-tuning(length=5)"])
def test_virtual_tokens_leave_room_for_the_longest_row(method, backbone, tmp_path) -> None:
    file = tmp_path / "long.tsv"
    file.write_text("text\tlabel\n" + ("good " * 90 + "\tpos\nbad " * 90 + "\tneg\n"))
    flags = {
        "backbone": str(backbone),
        "output": str(tmp_path / "run"),
        "method": method,
        "data": {"train": str(file), "eval": str(file)},
    }
    prepared = prepare(read(flags=flags))
    free = max_positions(prepared.model) - virtual_tokens(prepared.adapter)
    assert max(prepared.train.lengths) == prepared.recipe.train.max_length == free
    assert prepared.model(**prepared.train.batch([0, 1])).loss.isfinite()


def test_the_chosen_length_is_recorded_and_told(recipe_with) -> None:
    prepared = prepare(recipe_with())
    assert prepared.recipe.train.max_length == 64, "the positions of the backbone"
    assert any("train.max_length is 64" in note for note in prepared.notes)


def test_a_model_that_is_placed_already_stays_where_it_is(monkeypatch) -> None:
    model = tiny_models.model("llama", "causal-lm")
    model.hf_device_map = {"": "cpu"}
    monkeypatch.setattr(type(model), "to", lambda *_: pytest.fail("the model was moved"))
    make_ready(model)
    assert model.config.use_cache is False

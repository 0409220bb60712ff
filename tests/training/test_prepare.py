"""Preparing a run: data, backbone and adapter, before anything is written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models
import torch

from adapterhub.errors import ConfigError
from adapterhub.training.prepare import make_ready, max_positions, prepare
from adapterhub.training.recipe import Recipe, read


@pytest.fixture
def recipe(backbone: Path, data: tuple[Path, Path], tmp_path: Path):
    """A recipe on the tiny backbone, with overrides."""

    def with_overrides(*words: str) -> Recipe:
        files = {"train": str(data[0]), "eval": str(data[1])}
        flags = {"backbone": str(backbone), "output": str(tmp_path / "run"), "data": files}
        return read(None, words, flags)

    return with_overrides


def test_it_is_ready_and_writes_nothing(recipe, tmp_path: Path) -> None:
    prepared = prepare(recipe("method=lora(rank=2)"))
    assert prepared.data.labels == prepared.adapter.labels == ("neg", "pos")
    assert len(prepared.train.rows) == len(prepared.data.train) == 64
    assert prepared.adapter.metadata.task == "classification"
    assert prepared.model.config.use_cache is False
    assert not (tmp_path / "run").exists()


def test_the_same_seed_gives_the_same_initial_tensors(recipe) -> None:
    first, second, other = (prepare(recipe(f"seed={seed}")).adapter.tensors() for seed in (5, 5, 6))
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
def test_the_schedule_is_the_chosen_one_or_the_methods_default(recipe, words, schedule) -> None:
    assert prepare(recipe(*words)).recipe.train.schedule == schedule


def test_inputs_are_no_longer_than_the_positions_of_the_backbone(recipe) -> None:
    prepared = prepare(recipe("train.max_length=100000"))
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
    assert max_positions(SimpleNamespace(config=SimpleNamespace())) == 1 << 30
    assert max_positions(tiny_models.model("bert")) < 1 << 20


def test_a_model_that_is_placed_already_stays_where_it_is(monkeypatch) -> None:
    model = tiny_models.model("llama", "causal-lm")
    model.hf_device_map = {"": "cpu"}
    monkeypatch.setattr(type(model), "to", lambda *_: pytest.fail("the model was moved"))
    make_ready(model)
    assert model.config.use_cache is False

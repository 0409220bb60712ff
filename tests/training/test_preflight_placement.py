"""Whether parameters are sharded: the recipe, the launcher, and options that do not know it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adapterhub.errors import ConfigError
from adapterhub.recipe.recipe import Recipe, TrainOptions
from adapterhub.training.run_data import placed

RECIPE = Recipe(backbone="b", method="lora", output="out")


def with_train(**options: object) -> Recipe:
    return replace(RECIPE, train=replace(TrainOptions(), **options))  # type: ignore[arg-type]


def test_a_recipe_that_says_nothing_is_not_changed() -> None:
    assert placed(RECIPE) == RECIPE
    assert placed(with_train(shard=False)).train.shard is None


def test_a_launcher_shards_unless_the_recipe_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ACCELERATE_USE_FSDP", "true"), ("FSDP_VERSION", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert placed(RECIPE).train.shard is True
    assert placed(with_train(shard=False)).train.shard is None


def test_one_process_shares_with_nobody() -> None:
    with pytest.raises(ConfigError, match="there is only one") as error:
        placed(with_train(shard=True))
    assert "torchrun" in error.value.hint


def test_every_option_that_does_not_know_shards_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = {"shard": True, "optimizer": "adamw-8bit", "mixed_precision": "fp16"}
    with pytest.raises(ConfigError) as error:
        placed(replace(with_train(**options), quantize="int8"))
    text = str(error.value)
    assert "train.optimizer=adamw-8bit" in text
    assert "train.mixed_precision=fp16" in text
    assert "quantize=int8" in text
    assert placed(with_train(shard=True, mixed_precision="bf16")).train.shard is True


def test_processes_that_compute_together_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="there is only one") as error:
        placed(with_train(tensor_parallel=True))
    assert "torchrun" in error.value.hint
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert placed(with_train(tensor_parallel=True)).train.tensor_parallel


def test_every_option_that_does_not_know_tensor_parallelism_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    recipe = with_train(
        tensor_parallel=True, shard=True, optimizer="adamw8bit", mixed_precision="fp16"
    )
    recipe = replace(recipe, quantize="nf4", new_tokens=("<a>",))
    with pytest.raises(ConfigError, match="these options") as error:
        placed(replace(recipe, train=replace(recipe.train, shard=False)))
    named = [line.partition(":")[0] for line in error.value.offenders]
    assert named == ["train.optimizer=adamw8bit", "train.mixed_precision=fp16", "quantize=nf4",
                     "new_tokens"]  # fmt: skip

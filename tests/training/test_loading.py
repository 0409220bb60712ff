"""Runs on a shared backbone end as they do alone, to the byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import adapterhub as ah
from adapterhub.anatomy.backbone import TransformersBackbone
from adapterhub.errors import TrainingError
from adapterhub.methods import METHODS
from adapterhub.methods.common.base import dump_methods
from adapterhub.recipe.recipe import Recipe, read
from adapterhub.training import loading
from adapterhub.training.loading import BackboneLoader, SharedLoader
from adapterhub.training.run import run
from tests.kit.runs import Notes, adapter_bytes, final_bytes, quiet
from tests.kit.selection import cases_of
from tests.kit.task_cases import CASES
from tests.kit.tiny_models import FULL_MATRIX

FUSED = "adapterfusion"  # is built from adapters that are attached
SPECS = {name: list(dump_methods([m.example()])) for name, m in METHODS.items() if name != FUSED}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the calls that load a backbone and that encode rows."""
    counts = {"_load": 0, "fit_rows": 0}

    def counting(name: str) -> Any:
        original = getattr(loading, name)

        def called(*args: Any) -> Any:
            counts[name] += 1
            return original(*args)

        return called

    for name in counts:
        monkeypatch.setattr(loading, name, counting(name))
    return counts


@pytest.fixture
def recipe(recipe_with) -> Recipe:
    words = ["method=lora(rank=2)", "train.max_steps=3", "dtype=fp32", "train.log_every=1"]
    return recipe_with(*words, "train.tensorboard=false", "train.report=false")


def train(recipe: Recipe, output: Path, loader: BackboneLoader | None = None) -> tuple[bytes, ...]:
    """Train into a folder; return the bytes that only recipe, data and versions decide."""
    recipe = replace(recipe, output=str(output))
    run(recipe, quiet(recipe), loader=loader)
    return (*final_bytes(output), adapter_bytes(output))


def test_every_method_ends_as_alone_and_leaves_the_backbone_as_it_was(
    recipe: Recipe, tmp_path: Path, counted: dict[str, int], subtests: pytest.Subtests
) -> None:
    """All have one backbone, one after the other."""
    assert SPECS.keys() == METHODS.keys() - {FUSED}
    expected, shared = train(recipe, tmp_path / "alone"), SharedLoader()
    assert train(recipe, tmp_path / "first", shared) == expected
    loaded = counted["_load"]
    for name in cases_of(sorted(SPECS), 12):
        method = replace(recipe, method=SPECS[name], seed=4)
        with subtests.test(name):
            alone = train(method, tmp_path / f"alone-{name}")
            loaded += 1
            assert train(method, tmp_path / name, shared) == alone
            # What a method changes in the backbone is gone when its run has ended.
            assert train(recipe, tmp_path / f"after-{name}", shared) == expected
            assert counted["_load"] == loaded


@pytest.mark.parametrize("name", sorted(CASES) if FULL_MATRIX else ["causal-lm", "masked-lm"])
def test_every_task_ends_as_alone(name: str, backbones: Any, tmp_path: Path) -> None:
    case = CASES[name]
    source = str(case.data(tmp_path))
    words = ["train.max_steps=3", "train.tensorboard=false", "train.report=false", "dtype=fp32"]
    flags = {"backbone": str(backbones(case.backbone)), "output": "x", "task": case.task,
             "data": {"train": source, "eval": source}}  # fmt: skip
    recipe = read(None, ["method=houlsby", *words, *case.words], flags)
    shared = SharedLoader()
    for seed in (0, 1):
        seeded = replace(recipe, seed=seed)
        expected = train(seeded, tmp_path / f"alone-{seed}")
        assert train(seeded, tmp_path / f"shared-{seed}", shared) == expected


@pytest.mark.parametrize(
    ("changes", "loads", "encodings"),
    [
        ([{"seed": seed} for seed in range(3)], 1, 1),
        ([{"dtype": dtype} for dtype in ("fp32", "bf16") * 2], 2, None),
        ([{"new_tokens": ("<new>",)}] * 2, 2, None),
    ],
)
def test_a_backbone_is_loaded_and_rows_are_encoded_once(
    recipe: Recipe, tmp_path: Path, counted: dict[str, int], changes, loads, encodings
) -> None:
    """Another dtype is another backbone, and new tokens are not shared."""
    shared = SharedLoader()
    runs = [
        train(replace(recipe, **change), tmp_path / str(number), shared)
        for number, change in enumerate(changes)
    ]
    assert counted["_load"] == loads
    assert encodings in (None, counted["fit_rows"])
    assert "new_tokens" not in changes[0] or runs[0] == runs[1]


def test_a_head_that_cannot_be_drawn_again_is_loaded_again(
    recipe: Recipe, tmp_path: Path, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [train(replace(recipe, seed=s), tmp_path / f"alone-{s}") for s in (0, 1)]
    draw = TransformersBackbone.initialize_again

    def otherwise(backbone: TransformersBackbone) -> None:
        torch.rand(1)
        draw(backbone)

    monkeypatch.setattr(TransformersBackbone, "initialize_again", otherwise)
    shared = SharedLoader()
    counted["_load"] = 0
    for seed in (0, 1):
        found = train(replace(recipe, seed=seed), tmp_path / f"shared-{seed}", shared)
        assert found == expected[seed]
    assert counted["_load"] == 2


def test_a_run_that_fails_leaves_a_backbone_for_the_next(
    recipe: Recipe, tmp_path: Path, counted: dict[str, int]
) -> None:
    expected = train(recipe, tmp_path / "alone")
    shared = SharedLoader()
    counted["_load"] = 0
    wild = replace(recipe, method="full", train=replace(recipe.train, learning_rate=1e30))
    with pytest.raises(TrainingError, match="training stopped"):
        train(wild, tmp_path / "wild", shared)
    assert train(recipe, tmp_path / "next", shared) == expected
    assert counted["_load"] == 1


def test_frozen_layers_are_computed_once_for_all_runs(recipe: Recipe, tmp_path: Path) -> None:
    options = replace(recipe.train, max_steps=None, epochs=2)
    shared, notes = SharedLoader(), Notes()
    for seed in (0, 1):
        head = replace(recipe, method="head", seed=seed, train=options)
        alone = train(head, tmp_path / f"alone-{seed}")
        head = replace(head, output=str(tmp_path / f"shared-{seed}"))
        run(head, notes, loader=shared)
        assert adapter_bytes(head.output) == alone[-1]
    about = [note for note in notes.notes if "frozen layer" in note]
    assert ["from an earlier run" in note for note in about] == [False, True]


def test_a_model_with_other_adapters_is_not_given_away(
    recipe: Recipe, tmp_path: Path, counted: dict[str, int]
) -> None:
    shared = SharedLoader()
    train(recipe, tmp_path / "first", shared)
    (kept,) = shared.kept.values()
    ah.attach(kept.loaded.model, "lora", name="mine")
    train(recipe, tmp_path / "second", shared)
    assert counted["_load"] == 2
    assert list(ah.adapters(kept.loaded.model)) == ["mine"]

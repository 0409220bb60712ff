"""Frozen layers are computed once in a run, with equal results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adapterhub.loop.report import Reporter, TrainingLine
from adapterhub.recipe.recipe import Recipe, read
from adapterhub.speed import frozen_cache
from adapterhub.speed.frozen_cache import StackReplay
from adapterhub.training.run import run
from tests.kit.runs import adapter_bytes
from tests.kit.task_cases import CASES
from tests.kit.tiny_models import FULL_MATRIX

FEW_TASKS = ("causal-lm", "multiple-choice", "question-answering")


class Notes(Reporter):
    """Keeps the notes and losses of a run, and may stop it after a step."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.notes: list[str] = []
        self.losses: list[float] = []
        self.stop_after = stop_after

    def note(self, text: str) -> None:
        self.notes.append(text)

    def trained(self, line: TrainingLine, timing: Any) -> None:
        self.losses.append(line.loss)

    def advance(self, step: int) -> None:
        if step - 1 == self.stop_after:
            raise KeyboardInterrupt

    def about_layers(self) -> list[str]:
        return [note for note in self.notes if "frozen layer" in note or "frozen_cache" in note]


@pytest.fixture
def recipe(recipe_with):
    """Three epochs of a head, on 64 rows."""
    words = ["method=head", "train.epochs=3", "train.batch_size=8", "train.eval_every=epoch"]
    return recipe_with(*words, "train.tensorboard=false", "train.report=false", "train.log_every=1")


def changed(recipe: Recipe, output: str, method: str = "head", **train: Any) -> Recipe:
    """Return the recipe with another folder, method and training options."""
    folder = Path(recipe.output).with_name(output)
    train_options = replace(recipe.train, **train)
    return replace(recipe, output=str(folder), method=method, train=train_options)


def calls_of_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of each layer that is computed."""
    computed: list[int] = []
    forward = StackReplay.forward

    def counted(self: Any, number: int, compute: Any, *args: Any, **kwargs: Any) -> Any:
        def compute_it(*args: Any, **kwargs: Any) -> Any:
            computed.append(number)
            return compute(*args, **kwargs)

        return forward(self, number, compute_it, *args, **kwargs)

    monkeypatch.setattr(StackReplay, "forward", counted)
    return computed


@pytest.mark.parametrize("method", ["head", "scalar-mix", "lora(layers=top 1)"])
def test_the_results_are_those_without_a_cache(recipe, method, monkeypatch):
    computed = calls_of_layers(monkeypatch)
    off, on = changed(recipe, "off", method, frozen_cache="off"), changed(recipe, "on", method)
    plain, cached = Notes(), Notes()
    expected = run(off, plain).result
    assert not computed  # without a cache nothing enters the forward pass
    assert not plain.about_layers()
    result = run(on, cached).result
    (note,) = cached.about_layers()
    assert "computed once for 86 rows, and kept in bf16" in note
    assert "in memory; train.frozen_cache=off" in note
    assert torch.allclose(torch.tensor(cached.losses), torch.tensor(plain.losses), atol=0.02)
    assert [r["step"] for r in result.history] == [r["step"] for r in expected.history]
    # Rows of one length share a pass: far fewer than the 24 steps and three evaluations.
    assert 0 < computed.count(0) < 20


@pytest.mark.parametrize(
    ("method", "stop_after"), [("head", 3), ("freeze(top=1)", 17), ("unfreeze", 11)]
)
def test_a_killed_run_resumes_to_the_same_bytes(recipe, method, stop_after):
    whole = changed(recipe, "whole", method, save_every=stop_after)
    cut = changed(recipe, "cut", method, save_every=stop_after)
    notes = Notes()
    run(whole, notes)
    assert notes.about_layers()
    with pytest.raises(KeyboardInterrupt):
        run(cut, Notes(stop_after))
    run(cut, Notes(), resume=True)
    assert adapter_bytes(cut.output) == adapter_bytes(whole.output)


def test_a_stage_that_reaches_lower_layers_uses_what_was_recorded(recipe):
    notes = Notes()
    run(changed(recipe, "run", "unfreeze", epochs=4), notes)
    assert len(notes.about_layers()) == 1  # the second stage needs layer 0, which is recorded


def test_what_is_too_large_is_computed_at_each_step(recipe):
    off, small = changed(recipe, "off", frozen_cache="off"), changed(recipe, "small")
    small = replace(small, train=replace(small.train, frozen_cache_gb=1e-6))
    notes = Notes()
    run(off, Notes())
    run(small, notes)
    (note,) = notes.about_layers()
    assert "their outputs take" in note
    assert "train.frozen_cache_gb" in note
    assert adapter_bytes(off.output) == adapter_bytes(small.output)


@pytest.mark.parametrize(
    ("train", "reason"),
    [({"dropout": True}, "dropout"), ({"gradient_checkpointing": True}, "computes layers again")],
)
def test_options_that_exclude_it_are_named(recipe, train, reason):
    silent, asked = Notes(), Notes()
    run(changed(recipe, "silent", **train), silent)
    run(changed(recipe, "asked", frozen_cache="memory", **train), asked)
    assert not silent.about_layers()
    assert reason in asked.about_layers()[0]


def test_nothing_is_said_or_recorded_where_every_layer_trains(recipe):
    notes = Notes()
    run(changed(recipe, "run", "lora"), notes)
    assert not notes.about_layers()


def test_steps_that_do_not_reach_every_row_record_the_evaluation_alone(recipe):
    notes = Notes()
    run(changed(recipe, "run", epochs=None, max_steps=3), notes)
    assert "for 22 rows" in notes.about_layers()[0]


def test_outputs_that_differ_turn_it_off(recipe, monkeypatch):
    def refuse(*arguments: Any) -> None:
        raise frozen_cache.NotUsed("they differ")

    monkeypatch.setattr(frozen_cache, "find_plan", refuse)
    notes = Notes()
    run(changed(recipe, "run"), notes)
    assert notes.about_layers() == ["frozen layers are computed at each step: they differ"]


def test_the_manifest_names_the_option(recipe):
    on = changed(recipe, "run", frozen_cache="memory")
    run(on, Reporter())
    manifest = json.loads((Path(on.output) / "adapter" / "adapter.json").read_text("utf-8"))
    assert manifest["training"]["recipe"]["train"]["frozen_cache"] == "memory"


# Why a task's case is not cached.
NOT_CACHED = {
    "masked-lm": "change with each epoch",
    "span-corruption": "change with each epoch",
    "denoising": "change with each epoch",
    "speech-recognition": "are decoded for each batch",
    "audio-classification": "are decoded for each batch",
    "image-classification": "are decoded for each batch",
    "image-text-to-text": "are decoded for each batch",
    "question-answering": "outputs change",  # its loss in transformers reads padding
    "seq2seq": "outputs change",  # T5: the first of two layers hands its relative positions on
}


@pytest.mark.parametrize("name", sorted(CASES) if FULL_MATRIX else FEW_TASKS)
def test_every_task_has_the_results_without_a_cache(name, backbones, tmp_path):
    case = CASES[name]
    source = str(case.data(tmp_path))
    words = ["method=houlsby(layers=top 1)", "train.max_steps=14", "train.batch_size=8"]
    words += ["train.tensorboard=false", "train.report=false", "train.log_every=1", *case.words]
    data = {"data": {"train": source, "eval": source}, "task": case.task}
    losses: list[list[float]] = []
    for where in ("off", "memory"):
        flags = {"backbone": str(backbones(case.backbone)), "output": str(tmp_path / where)}
        notes = Notes()
        run(read(None, [*words, f"train.frozen_cache={where}"], flags | data), notes)
        losses.append(notes.losses)
    assert NOT_CACHED.get(name, "computed once") in notes.about_layers()[0]
    assert (losses[0] == losses[1]) == (name in NOT_CACHED)
    assert torch.allclose(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=0.02, atol=0.02)

"""Methods that change some tokens: trained by a run, killed and resumed, and evaluated alike."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from task_cases import pairs
from training_runs import final_bytes

import adapterhub as ah
from adapterhub.backbones.learned_tokens import learned_tokens
from adapterhub.loop.batching import LazyBatches
from adapterhub.loop.report import reporter_for
from adapterhub.recipe.recipe import read
from adapterhub.training.run import run

METHODS = ("loreft(rank=2)", "alora(rank=2)")


class KillAt(LazyBatches):
    """Kills the process when a batch is collated."""

    def __getitem__(self, index: int, /) -> Any:
        if index == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("method", METHODS)
def test_killed_and_resumed_gives_the_same_bytes(
    method: str, backbones: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = str(pairs(tmp_path))

    def train(name: str, resume: bool = False) -> Any:
        words = [f"method={method}", "train.epochs=2", "train.save_every=3", "train.report=false",
                 "train.tensorboard=false", "train.batch_size=8", "dtype=fp32"]  # fmt: skip
        flags = {"backbone": str(backbones("llama")), "output": str(tmp_path / name),
                 "task": "causal-lm", "data": {"train": data, "eval": data}}  # fmt: skip
        recipe = read(None, words, flags)
        output = Path(recipe.output)
        return run(recipe, reporter_for(output, recipe.train, quiet=True), resume=resume)

    losses = [record["loss"] for record in train("whole").result.history]
    assert losses[-1] < losses[0]
    child = os.fork()
    if child == 0:
        try:
            monkeypatch.setattr("adapterhub.training.run.LazyBatches", KillAt)
            train("cut")
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert (tmp_path / "cut" / "checkpoints" / "last" / "progress.json").is_file()
    train("cut", resume=True)
    assert final_bytes(tmp_path / "cut") == final_bytes(tmp_path / "whole")


@pytest.mark.parametrize("method", ["loreft", "alora"])
def test_a_pass_without_labels_is_told_where_prompts_end(method: str) -> None:
    model = tiny_models.language_model("llama")
    tiny_models.scramble(ah.attach(model, method))
    ids = tiny_models.batch()["input_ids"]
    labels = ids.clone()
    labels[:, :4] = -100
    with torch.no_grad():
        expected = model(ids, labels=labels).logits
        assert not torch.allclose(model(ids).logits, expected, atol=1e-3)
        with learned_tokens(labels):
            assert torch.equal(model(ids).logits, expected)

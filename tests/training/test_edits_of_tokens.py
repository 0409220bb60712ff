"""Methods that change some tokens: trained by a run, killed and resumed, and evaluated alike."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest
import torch

import adapterhub as ah
from adapterhub.loop.report import Several
from adapterhub.recipe.recipe import read
from adapterhub.tasks.common.batches import learned
from adapterhub.training.run import run
from tests.kit import tiny_models
from tests.kit.runs import Notes, final_bytes, forks, killed, quiet
from tests.kit.task_cases import pairs

METHODS = ("loreft(rank=2)", "alora(rank=2)")


def trained(
    method: str, backbone: str, folder: Path, name: str, *words: str,
    kill_at: int | None = None, resume: bool = False,
) -> list[float]:  # fmt: skip
    """Train on pairs of a prompt and a response; return the losses."""
    data = str(pairs(folder))
    words = (f"method={method}", "train.epochs=2", "train.save_every=3", "train.report=false",
             "train.tensorboard=false", "train.batch_size=8", "dtype=fp32", *words)  # fmt: skip
    flags = {"backbone": backbone, "output": str(folder / name), "task": "causal-lm",
             "data": {"train": data, "eval": data}}  # fmt: skip
    recipe = read(None, list(words), flags)
    reporter = Several([quiet(recipe), Notes(kill_at, signal.SIGKILL)])
    return [record["loss"] for record in run(recipe, reporter, resume=resume).result.history]


@forks
@pytest.mark.parametrize("method", METHODS)
def test_killed_and_resumed_gives_the_same_bytes(method, backbones, tmp_path):
    train = partial(trained, method, str(backbones("llama")), tmp_path)
    losses = train("whole")
    assert losses[-1] < losses[0]
    killed(lambda: train("cut", kill_at=5))
    assert (tmp_path / "cut" / "checkpoints" / "last" / "progress.json").is_file()
    train("cut", resume=True)
    assert final_bytes(tmp_path / "cut") == final_bytes(tmp_path / "whole")


@pytest.mark.parametrize("method", METHODS)
def test_recomputed_and_replayed_layers_have_the_places(method, backbones, tmp_path):
    train = partial(trained, method, str(backbones("llama")), tmp_path)
    expected = train("plain", "train.frozen_cache=off")
    again = train("again", "train.frozen_cache=off", "train.gradient_checkpointing=true")
    assert again == pytest.approx(expected, abs=1e-5)
    assert train("replayed", "train.frozen_cache=memory") == pytest.approx(expected, abs=5e-3)


@pytest.mark.parametrize("method", ["loreft", "alora"])
def test_a_pass_without_labels_is_told_where_prompts_end(method):
    model = tiny_models.language_model("llama")
    tiny_models.scramble(ah.attach(model, method))
    ids = tiny_models.batch()["input_ids"]
    labels = ids.clone()
    labels[:, :4] = -100
    with torch.no_grad():
        expected = model(ids, labels=labels).logits
        assert not torch.allclose(model(ids).logits, expected, atol=1e-3)
        with learned({"labels": labels}):
            assert torch.equal(model(ids).logits, expected)

"""Optimizers: exact resume, and the predicted memory of their state."""

from __future__ import annotations

import pytest
import tiny_models
import torch

import adapterhub as ah
from adapterhub.errors import ConfigError
from adapterhub.loop import optimizers
from adapterhub.loop.engine import Engine
from adapterhub.loop.optimizers import OPTIMIZERS
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.recipe.options import RunOptions

pytest.importorskip("bitsandbytes", reason='pip install "adapterhub[quantized]"')
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}


def started(optimizer):
    """An engine that trains all tensors of a tiny backbone, small and large."""
    torch.manual_seed(0)
    adapter = ah.attach(tiny_models.model("bert", **SIZES, **tiny_models.NO_DROPOUT), "full")
    engine = Engine(AdapterTrainee(adapter), RunOptions(optimizer=optimizer))
    engine.begin(8)
    return engine


def steps(engine, numbers):
    for seed in numbers:
        rows = tiny_models.batch(seed=seed) | {"labels": torch.tensor([0, 1, 2])}
        engine.step([rows], range(1), done=1.0)


def tensors(engine):
    return {name: t.detach().clone() for name, t in engine.trainee.tensors().items()}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_it_resumes_exactly(name, tmp_path):
    whole = started(name)
    steps(whole, range(6))
    cut = started(name)
    start = tensors(cut)
    steps(cut, range(3))
    saved = tensors(cut)
    torch.save(cut.state(), tmp_path / "state")
    again = started(name)
    with torch.no_grad():
        for key, tensor in again.trainee.tensors().items():
            tensor.copy_(saved[key])
    again.load_state(torch.load(tmp_path / "state", weights_only=True))
    steps(again, range(3, 6))
    expected = tensors(whole)
    assert all(torch.equal(t, expected[key]) for key, t in tensors(again).items())
    assert all(not torch.equal(expected[key], start[key]) for key in start)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_the_predicted_memory_is_the_real_one(name):
    engine = started(name)
    steps(engine, range(1))
    state_tensors = [v for state in engine.optimizer.state.values() for k, v in state.items()
            if isinstance(v, torch.Tensor) and v.numel() > 1 and "qmap" not in k]  # fmt: skip
    real = sum(t.numel() * t.element_size() for t in state_tensors)
    predicted = sum(map(OPTIMIZERS[name].bytes, engine.trainee.tensors().values()))
    assert predicted == pytest.approx(real, rel=0.01)


def test_eight_bits_are_less():
    parameter = torch.zeros(64, 4096)
    sizes = {name: row.bytes(parameter) for name, row in OPTIMIZERS.items()}
    assert sizes["adamw-8bit"] < 0.27 * sizes["adamw"]


def test_without_bitsandbytes(monkeypatch):
    monkeypatch.setattr(optimizers.importlib.util, "find_spec", lambda name: None)
    started("adamw")
    with pytest.raises(ConfigError, match="bitsandbytes") as error:
        started("adamw-8bit")
    assert "adapterhub[quantized]" in error.value.hint

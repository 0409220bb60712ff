"""Loading an adapter draws no initial values, and attaching one draws them as before."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

import adapterhub as ah
from tests.kit import tiny_models

DRAWS = {"uniform_", "normal_", "trunc_normal_", "randn", "rand", "bernoulli_"}


class _Draws(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in DRAWS:
            self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "method", ["lora", "rslora", "houlsby", "pfeiffer", "parallel", "prefix", "ia3", "mam"]
)
def test_load_draws_no_values(method, tmp_path):
    model = tiny_models.usual_model("bert")
    adapter = ah.attach(model, method, name="a")
    tiny_models.scramble(adapter)
    adapter.save(tmp_path / "a")
    before = torch.random.get_rng_state()
    with _Draws() as draws:
        loaded = ah.load(model, tmp_path / "a", name="b")
    assert not draws.names
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(loaded.tensors()[n], t) for n, t in adapter.saved_tensors().items())

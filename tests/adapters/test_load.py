"""Loading a folder: all of it or nothing, and no initial values."""

from __future__ import annotations

import pytest
import torch
from forge import refused
from torch.overrides import TorchFunctionMode

import adapterhub as ah
from adapterhub.adapters.load import load_folder
from adapterhub.errors import MismatchError
from tests.kit import tiny_models
from tests.kit.tiny_adapters import save_alone


def test_a_different_backbone_is_refused(tmp_path):
    """And the other adapters stay active."""
    folder, model = save_alone(tmp_path / "polite"), tiny_models.model("bert", seed=1)
    with refused(model, "different backbone"):
        load_folder(model, folder)
    ah.attach(model, "ia3", name="mine")
    before = model(**tiny_models.batch()).logits
    with pytest.raises(MismatchError):
        load_folder(model, folder)
    assert torch.equal(model(**tiny_models.batch()).logits, before)


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

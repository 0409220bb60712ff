"""Loading a folder: all of it or nothing."""

from __future__ import annotations

import pytest
import torch
from forge import refused

import adapterhub as ah
from adapterhub.adapters.load import load_folder
from adapterhub.errors import MismatchError
from tests.kit import tiny_models


@pytest.fixture
def saved(tmp_path):
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "lora(rank=2)", name="polite")
    tiny_models.scramble(adapter)
    adapter.save(tmp_path / "polite")
    return tmp_path / "polite", model(**tiny_models.batch()).logits


def test_a_loaded_adapter_computes_the_same(saved):
    folder, logits = saved
    model = tiny_models.model("bert")
    assert load_folder(model, folder).name == "polite"
    assert torch.equal(model(**tiny_models.batch()).logits, logits)


def test_without_head_the_model_keeps_its_own(saved):
    folder, _ = saved
    model = tiny_models.model("bert", num_labels=5)
    adapter = load_folder(model, folder, head=False)
    assert adapter.head is None
    assert model(**tiny_models.batch()).logits.shape[-1] == 5


def test_loading_draws_no_random_numbers(saved):
    folder, _ = saved
    model = tiny_models.model("bert")
    before = torch.get_rng_state()
    load_folder(model, folder)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_different_backbone_is_refused(saved):
    folder, _ = saved
    model = tiny_models.model("bert", seed=1)
    with refused(model, "different backbone"):
        load_folder(model, folder)


def test_the_other_adapters_stay_active_on_an_error(saved):
    folder, _ = saved
    model = tiny_models.model("bert", seed=1)
    ah.attach(model, "ia3", name="mine")
    before = model(**tiny_models.batch()).logits
    with pytest.raises(MismatchError):
        load_folder(model, folder)
    assert torch.equal(model(**tiny_models.batch()).logits, before)

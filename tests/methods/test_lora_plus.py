"""LoRA+: LoRA whose B has a higher learning rate than its A."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import ConfigError
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.recipe.recipe import TrainOptions
from tests.kit import tiny_models


def test_the_learning_rate_of_b_is_a_multiple_of_that_of_a():
    adapter = ah.attach(tiny_models.model("bert"), "lora-plus(ratio=8)")
    groups = AdapterTrainee(adapter).param_groups(TrainOptions(learning_rate=1e-3))
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert len(rates) == len(adapter.parameters())
    for placed in adapter.placed:
        assert rates[id(placed.module.A)] == 1e-3
        assert rates[id(placed.module.B)] == 8e-3
    assert len({group["name"] for group in groups}) == len(groups) == 3


def test_outputs_and_count_equal_those_of_lora():
    adapters = []
    for method in ("lora(rank=3)", "lora-plus(rank=3)"):
        torch.manual_seed(0)
        adapters.append(ah.attach(tiny_models.model("bert"), method))
        tiny_models.scramble(adapters[-1])
    first, second = adapters
    assert first.count() == second.count() == 2 * 2 * 3 * (32 + 32)
    with torch.no_grad():
        expected, logits = (a.model(**tiny_models.batch()).logits for a in adapters)
    assert torch.equal(logits, expected)


def test_a_ratio_that_is_no_number_is_refused():
    with pytest.raises(ConfigError) as error:
        ah.attach(tiny_models.model("bert"), "lora-plus(ratio='high')")
    assert "ratio" in str(error.value)

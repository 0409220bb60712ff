"""The part of a weight that an initialization of peft subtracts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from adapterhub.interchange.peft.updates import subtracted_factors

peft = pytest.importorskip("peft")


@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("initialization", ["pissa", "olora"])
@pytest.mark.parametrize("rank", [3, 9])
def test_the_subtracted_part_is_that_of_peft(initialization, kind, rank):
    """A rank above that of the weight takes all of its components."""
    torch.manual_seed(0)
    module = nn.Sequential(kind(6, 6))
    weight = module[0].weight.detach().clone()
    expected = weight.T if kind is Conv1D else weight
    left, right = subtracted_factors(initialization, module[0], expected, min(rank, 6), 2.0)
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, init_lora_weights=initialization, target_modules=["0"]
    )
    changed = peft.get_peft_model(module, config).base_model.model[0].base_layer.weight.detach()
    changed = changed.T if kind is Conv1D else changed
    torch.testing.assert_close(expected - 2.0 * left @ right, changed, atol=1e-5, rtol=0)

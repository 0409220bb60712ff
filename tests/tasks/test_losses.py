"""The loss of the next tokens is the one that models compute, for every architecture."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoConfig

from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.tasks.common.batches import IGNORED, next_token_loss
from tests.kit import tiny_models
from tests.kit.tiny_models import MATRIX

# Their own loss compares each token with the logits at itself: tests/backbones/test_probe.py.
UNSHIFTED = ("bart", "mbart", "plbart", "pegasus", "xlnet")


def config_of(architecture: str) -> transformers.PreTrainedConfig:
    """Return the configuration of a tiny model."""
    tokens = {"vocab_size": tiny_models.VOCAB, "pad_token_id": 1, "eos_token_id": 2}
    sizes = tiny_models.SIZES[architecture] | tokens | tiny_models.NO_DROPOUT
    return AutoConfig.for_model(architecture, **sizes)


ARCHITECTURES = [
    architecture
    for architecture in MATRIX
    if TASK_MODELS["causal-lm"].classes_for(config_of(architecture))
    and architecture not in UNSHIFTED
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_loss_of_the_next_tokens_is_the_models(architecture: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(architecture)).eval()
    batch = tiny_models.batch()
    ignored = torch.arange(9) > torch.tensor([[8], [6], [2]])
    batch["labels"] = batch["input_ids"].masked_fill(ignored, IGNORED)
    with torch.no_grad():
        output = model(**batch)
    assert torch.allclose(next_token_loss(output, batch), output.loss, rtol=1e-6)

"""train.neftune_alpha: uniform noise on token embeddings, only where gradients are computed."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import ConfigError
from adapterhub.loop.engine import noisy_embeddings
from tests.kit import tiny_models
from tests.kit.own_models import network

ALPHA = 5.0


@pytest.mark.parametrize(("architecture", "method"), [
    ("llama", "lora"), ("bert", "prompt(length=3)"), ("t5", "full"),
])  # fmt: skip
def test_embeddings_get_noise_while_gradients_are_computed(architecture, method):
    model = tiny_models.usual_model(architecture)
    ah.attach(model, method)
    batch = tiny_models.labelled_batch(model)
    weight, seen = model.get_input_embeddings().weight, []
    tables = [m for m in model.modules() if getattr(m, "weight", None) is weight]
    bare = model(**batch).logits

    def same_seed():
        torch.manual_seed(3)
        return model(**batch).logits

    with noisy_embeddings(model, ALPHA):
        with torch.no_grad():
            torch.testing.assert_close(model(**batch).logits, bare)
        watches = [t.register_forward_hook(lambda m, i, o: seen.append((i[0], o))) for t in tables]
        noisy = same_seed()
        for watch in watches:
            watch.remove()
    assert not torch.allclose(noisy, bare)
    assert len(seen) == (2 if architecture == "t5" else 1)
    for ids, output in seen:
        most = ALPHA / (output.shape[1] * output.shape[2]) ** 0.5
        noise = output - weight[ids]
        assert noise.abs().max() <= most * (1 + 1e-4)
        assert noise.std().item() == pytest.approx(most / 3**0.5, rel=0.1)
    assert torch.equal(same_seed(), bare)


def test_a_backbone_without_tokens_is_refused():
    with (
        pytest.raises(ConfigError, match="no table of tokens"),
        noisy_embeddings(network("conv2d")[0], 1.0),
    ):
        pass

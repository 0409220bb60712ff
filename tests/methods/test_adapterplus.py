"""AdapterPlus: its equation, and its files."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from tests.kit import tiny_models
from tests.kit.tiny_models import logits


@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_it_is_pfeiffer_with_a_scale_for_each_feature(architecture):
    """Scales in the weights of an adapter without them give the same outputs."""
    model = tiny_models.model(architecture)
    adapter = ah.attach(model, "adapterplus(size=4)")
    tiny_models.scramble(adapter)
    found, tensors = logits(model), adapter.tensors()
    adapter.detach()
    plain = ah.attach(model, "pfeiffer(size=4, activation=gelu, source=block)")
    with torch.no_grad():
        for name, tensor in plain.tensors().items():
            theirs = tensors[name.replace("pfeiffer", "adapterplus")]
            if ".up." in name:
                scale = tensors[f"{name.partition('.pfeiffer.')[0]}.adapterplus.s"]
                theirs = theirs * (scale[:, None] if name.endswith("weight") else scale)
            tensor.copy_(theirs)
    torch.testing.assert_close(found, logits(model), atol=1e-5, rtol=1e-5)


def test_scales_train_and_are_folded_into_files(tmp_path):
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "adapterplus")
    tiny_models.scramble(adapter)
    model(**tiny_models.batch()).logits.square().sum().backward()
    scales = [t for name, t in adapter.tensors().items() if name.endswith(".s")]
    assert len(scales) == 2
    assert all(scale.grad.abs().min() > 0 for scale in scales)
    live = logits(model)
    manifest = adapter.save(tmp_path / "saved")
    assert [*manifest.methods[0]] == ["pfeiffer"]
    adapter.detach()
    ah.load(model, tmp_path / "saved")
    assert torch.equal(logits(model), live)

"""`ah.load` attaches an adapter by its reference."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import MismatchError, RegistryError
from tests.kit import tiny_models
from tests.kit.tiny_models import logits


@pytest.fixture
def registry(tmp_path):
    """Publish one name for two backbones that differ in their weights."""
    for seed in (0, 1):
        adapter = ah.attach(tiny_models.model("bert", seed=seed), "lora", name="polite")
        tiny_models.scramble(adapter, seed=seed)
        adapter.save(tmp_path / f"out-{seed}")
        ah.publish(tmp_path / f"out-{seed}", registry=tmp_path / "registry")
    return tmp_path / "registry"


@pytest.mark.parametrize("seed", [0, 1])
def test_the_adapter_for_the_models_backbone_is_loaded(registry, tmp_path, seed):
    model, expected = tiny_models.model("bert", seed=seed), tiny_models.model("bert", seed=seed)
    adapter = ah.load(model, "polite", name="renamed", registry=registry)
    ah.load(expected, tmp_path / f"out-{seed}")
    assert adapter.name == "renamed"
    assert torch.equal(logits(model), logits(expected))


def test_an_adapter_for_another_backbone_is_refused(registry, tmp_path):
    model = tiny_models.model("bert", seed=2)
    bare = logits(model)
    with pytest.raises(RegistryError, match="has no adapter 'polite' for"):
        ah.load(model, "polite", registry=registry)
    with pytest.raises(MismatchError):
        ah.load(model, tmp_path / "out-0")
    assert torch.equal(logits(model), bare)
    ah.load(model, tmp_path / "out-0", any_backbone=True)
    assert not torch.equal(logits(model), bare)


def test_an_fp16_copy_finds_its_adapter_among_several(registry, tmp_path):
    model, expected = tiny_models.model("bert", seed=1), tiny_models.model("bert", seed=1)
    tiny_models.model("bert", seed=1).half().save_pretrained(tmp_path / "copy")
    model = type(model).from_pretrained(tmp_path / "copy", dtype=torch.float32)
    ah.load(model, "polite", registry=registry)
    ah.load(expected, tmp_path / "out-1")
    assert torch.allclose(logits(model), logits(expected), atol=1e-2)


def test_adapters_that_were_trained_without_a_name_have_that_of_the_registry(tmp_path):
    """Else two of them could not be on one model."""
    for name in ("polite", "urgent"):
        ah.attach(tiny_models.model("bert"), "lora").save(tmp_path / name)
        ah.publish(tmp_path / name, name=name, registry=tmp_path / "registry")
    model = tiny_models.model("bert")
    for name in ("polite@v1", "urgent"):
        ah.load(model, name, registry=tmp_path / "registry")
    assert list(ah.adapters(model)) == ["polite", "urgent"]

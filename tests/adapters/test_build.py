"""Building an adapter does not touch the model."""

from __future__ import annotations

import pytest
import torch
import transformers
from forge import state_of

import adapterhub as ah
from adapterhub.adapters.attach import build_adapter
from adapterhub.adapters.state import bare
from adapterhub.errors import AttachError, SiteError
from adapterhub.methods import METHODS
from adapterhub.methods.common.base import parse_methods
from tests.kit import tiny_models


def test_the_model_is_not_touched(subtests):
    model = tiny_models.model("bert")
    before = state_of(model)
    for name, method in METHODS.items():
        with subtests.test(name):
            with bare(model) as state:
                adapter = build_adapter(state, (method.example(),), "a")
            assert state_of(model) == before
            assert adapter.parameters()
            assert not adapter.active


@pytest.mark.parametrize("method", ["full", "bitfit", "norms", "freeze", "unfreeze"])
def test_weights_in_float64_are_not_called_quantized(method):
    model = tiny_models.model("bert").double()
    with pytest.raises(SiteError) as error:
        ah.attach(model, method)
    assert "it is stored as float64" in str(error.value)
    assert "model.float()" in str(error.value)
    assert "quantized" not in str(error.value)


def test_names_that_look_alike_as_module_names_stay_apart():
    model = tiny_models.model("bert")
    ah.attach(model, "lora", name="a.b")
    ah.attach(model, "lora", name="a_b")
    keys = [name for name, _ in model.named_modules() if "a_b-" in name]
    assert len(keys) == len(set(keys)) == 2 * 4


def test_a_method_that_does_not_fit_lists_those_that_do():
    model = tiny_models.model("vit") if "vit" in tiny_models.ARCHITECTURES else None
    model = model or tiny_models.model("bert")
    with pytest.raises((SiteError, AttachError)) as error, bare(model) as state:
        build_adapter(state, parse_methods("lora(sites=['cross.q'])"), "a")
    assert "cross.q" in str(error.value)


def test_a_head_behind_an_encoder_is_of_modules_with_parameters():
    """PP-LCNet's class has its encoder beside the classifier, and a pooling between them."""
    config = transformers.PPLCNetConfig(num_labels=3)
    model = transformers.PPLCNetForImageClassification(config).eval()
    modules = dict(model.named_children())
    assert any(not list(module.parameters()) for module in modules.values())
    adapter = ah.attach(model, "head")
    assert adapter.head is not None
    assert all(list(module.parameters()) for module in adapter.head.own.values())
    adapter.detach()
    assert dict(model.named_children()) == modules


def test_labels_without_names_are_numbered_in_the_adapter_alone(tmp_path):
    """PVT's configuration has a number of labels, and no names."""
    config = transformers.PvtConfig(
        depths=[1] * 4, hidden_sizes=[4, 8, 8, 8], num_attention_heads=[1] * 4, num_labels=3
    )
    model = transformers.PvtForImageClassification(config).eval()
    assert config.id2label is None
    adapter = ah.attach(model, "head", name="a")
    assert adapter.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    adapter.save(tmp_path / "a")
    adapter.detach()
    assert config.id2label is None
    assert ah.load(model, tmp_path / "a").labels == adapter.labels
    with ah.route(model, ["a", None]):
        assert model(torch.zeros(2, 3, 224, 224)).logits.shape == (2, 3)

"""A projection with affine modules is a weight and a bias."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.anatomy.backbone import CHILD
from adapterhub.errors import MergeError
from adapterhub.merging.affine import merged_weight_and_bias
from tests.kit import tiny_models


def host_and_slot(*methods):
    model = tiny_models.model("bert")
    adapters = [ah.attach(model, method, name=str(n)) for n, method in enumerate(methods)]
    for seed, adapter in enumerate(adapters):
        tiny_models.scramble(adapter, seed=seed)
    ah.activate(model, *(adapter.name for adapter in adapters))
    host = model.get_submodule(adapters[0].placed[0].site.host)
    return host, host._modules[CHILD], [adapter.placed[0].module for adapter in adapters]


def test_lora_is_added_to_the_weight():
    host, slot, (lora,) = host_and_slot("lora(rank=2, sites=['attn.q'])")
    weight, bias = merged_weight_and_bias(host, slot)
    torch.testing.assert_close(weight, host.weight + lora.scale * lora.B @ lora.A)
    assert bias is None


def test_modules_are_applied_in_order():
    """y -> l (W x + b + s B A x): the scale comes last."""
    host, slot, (lora, scale) = host_and_slot("lora(sites=['attn.k'])", "ia3(sites=['attn.k'])")
    torch.nn.init.normal_(host.bias)
    weight, bias = merged_weight_and_bias(host, slot)
    scaled = scale.scale[:, None] * (host.weight + lora.scale * lora.B @ lora.A)
    torch.testing.assert_close(weight, scaled)
    torch.testing.assert_close(bias, scale.scale * host.bias)


def test_a_changed_input_is_the_last_factor():
    host, slot, (scale,) = host_and_slot("ia3(sites=['ffn.down'])")
    weight, bias = merged_weight_and_bias(host, slot)
    torch.testing.assert_close(weight, host.weight * scale.scale)
    assert bias is None


def test_a_bias_needs_a_place():
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "lora(sites=['attn.q'])")
    host = model.get_submodule(adapter.placed[0].site.host)
    host.bias = None
    module = adapter.placed[0].module
    module.forward = lambda x, y: y + 1
    with pytest.raises(MergeError, match="bias"):
        merged_weight_and_bias(host, host._modules[CHILD])

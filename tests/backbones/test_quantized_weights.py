"""Weights of quantized layers: decoded, encoded, and counted."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import nn

import adapterhub as ah
from adapterhub.backbones.quantized import (
    bytes_of,
    can_requantize,
    dequantized,
    requantized,
    row_scales,
    size_of,
)
from adapterhub.backbones.torch_free_checks import QUANTIZATION_LIBRARIES
from tests.kit.own_models import float8_layer

KINDS = [kind for kind, (library, _) in QUANTIZATION_LIBRARIES.items() if find_spec(library)]


def quantized_layer(kind, backbone):
    model, _ = ah.load_backbone(str(backbone), quantize=kind)
    return model.encoder.layer[0].attention.self.query


@pytest.mark.parametrize("kind", KINDS)
def test_the_decoded_weight_is_the_one_the_layer_computes_with(kind, backbone):
    layer = quantized_layer(kind, backbone)
    matrix = dequantized(layer).float()
    x = torch.randn(5, layer.in_features, dtype=torch.bfloat16)
    y = layer(x).float()
    expected = x.float() @ matrix.T + layer.bias.float()
    # The layer computes in bf16, int8 with activations rounded to 8 bits.
    assert (y - expected).norm() / expected.norm() < 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_encoding_a_decoded_weight_returns_the_same_weight(kind, backbone):
    layer = quantized_layer(kind, backbone)
    matrix = dequantized(layer)
    assert can_requantize(layer)
    weight, attributes = requantized(layer, matrix)
    assert type(weight) is type(layer.weight) or type(weight.data) is type(layer.weight.data)
    layer.weight = weight
    for name, value in attributes.items():
        setattr(layer, name, value)
    difference = (dequantized(layer).float() - matrix.float()).norm() / matrix.float().norm()
    assert difference < 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_bytes_of_a_quantized_weight(kind, backbone):
    layer = quantized_layer(kind, backbone)
    values = layer.in_features * layer.out_features
    assert size_of(layer.weight) == values
    assert values / 2 < bytes_of(layer.weight) < 4 * values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_plain_tensor_has_the_bytes_of_its_dtype(dtype):
    tensor = torch.zeros(3, 5, dtype=dtype)
    assert size_of(tensor) == 15
    assert bytes_of(tensor) == 15 * dtype.itemsize


def test_a_plain_layer_is_not_decoded():
    layer = nn.Linear(3, 5)
    assert dequantized(layer) is None
    assert row_scales(layer) is None
    assert not can_requantize(layer)


def test_int8_rows_are_scaled_by_their_scale():
    layer = nn.Linear(2, 3)
    layer.weight = nn.Parameter(
        torch.tensor([[127, 0], [-127, 1], [64, 2]], dtype=torch.int8), False
    )
    layer.weight.SCB = torch.tensor([1.0, 2.0, 127.0])
    assert row_scales(layer) is layer.weight.SCB
    expected = torch.tensor([[1, 0], [-2, 2 / 127], [64, 2]])
    torch.testing.assert_close(dequantized(layer), expected)


@pytest.mark.parametrize("block", [(16, 8), (16, 16), (7, 5), (48, 32)])
def test_blocks_of_fp8_are_scaled_by_their_scale(block):
    """Also blocks that do not divide the matrix."""
    linear = nn.Linear(30, 44)
    with torch.no_grad():
        linear.weight[:20].mul_(100)  # other scales
    found = dequantized(float8_layer(linear, block))
    assert found.shape == linear.weight.shape
    assert ((found - linear.weight).abs() <= 0.07 * linear.weight.abs() + 1e-4).all()
    assert not can_requantize(float8_layer(linear, block))

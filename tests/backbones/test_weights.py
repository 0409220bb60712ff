"""Reading weights, however they are stored."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import adapterhub as ah
from adapterhub.anatomy.backbone import (
    DTYPES,
    Backbone,
    device_of,
    has_values,
    is_sharded,
    storage_problem,
    storage_problems,
    whole,
)
from adapterhub.anatomy.sites import FeatureSlice
from adapterhub.backbones.weights import as_stored, read_bias, read_weight
from adapterhub.errors import SiteError
from tests.kit import tiny_models


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16])
def test_counters_and_masks_are_values(dtype):
    assert has_values(torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_codes_are_no_values(dtype):
    assert not has_values(torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize("module", [nn.Linear(3, 6), Conv1D(6, 3)])
def test_the_weight_is_output_by_input_in_any_layout(module):
    weight, bias = read_weight(module), read_bias(module)
    assert weight.shape == (6, 3)
    x = torch.randn(2, 3)
    torch.testing.assert_close(x @ weight.T + bias, module(x))
    assert as_stored(module, weight).shape == module.weight.shape
    assert torch.equal(as_stored(module, as_stored(module, weight)), weight)
    assert weight.data_ptr() == module.weight.data_ptr(), "a view"


def test_a_slice_of_a_fused_projection_is_rows_of_its_weight():
    module = nn.Linear(3, 6)
    part = FeatureSlice(1, 3, 3)
    assert torch.equal(read_weight(module, part), module.weight[[1, 2, 4, 5]])
    assert torch.equal(read_bias(module, part), module.bias[[1, 2, 4, 5]])
    assert read_bias(nn.Linear(3, 6, bias=False), part) is None


def test_weights_are_read_in_fp32():
    assert read_weight(nn.Linear(3, 6).to(torch.bfloat16)).dtype == torch.float32


def test_a_weight_that_is_no_matrix_is_refused():
    with pytest.raises(SiteError, match="weight of a Embedding cannot be read") as error:
        read_weight(nn.Embedding(3, 5))
    assert "lora" in error.value.hint


def test_storage_problems():
    codes = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    quantized = type("Params4bit", (nn.Parameter,), {})(torch.zeros(2))
    parameters = {"plain": nn.Parameter(torch.zeros(2)), "codes": codes, "quantized": quantized}
    assert storage_problem(parameters["plain"]) == ""
    assert storage_problem(codes) == "it is stored as int8"
    assert storage_problem(quantized) == "it is quantized: Params4bit"
    assert storage_problem(None) == "it is not stored as one parameter"
    assert storage_problems(parameters, parameters) == [
        "codes: it is stored as int8", "quantized: it is quantized: Params4bit"
    ]  # fmt: skip
    assert storage_problems(parameters, parameters, shown=1)[1:] == ["and 1 more"]


@pytest.mark.parametrize(
    ("dtype", "name"), [*zip(DTYPES.values(), DTYPES, strict=True), (torch.float64, None)]
)
def test_the_dtype_of_a_model(dtype, name):
    model = tiny_models.model("bert").to(dtype)
    assert Backbone.of(model).dtype_and_quantization({}) == (name, None)


def test_the_dtype_is_that_of_the_backbone_and_not_of_a_replaced_parameter():
    model = tiny_models.model("bert")
    first = next(model.parameters())
    original = nn.Parameter(first.detach().half())
    assert Backbone.of(model).dtype_and_quantization({id(first): original}) == ("fp16", None)


def test_the_quantization_of_a_model():
    model = tiny_models.model("bert")
    model.config.quantization_config = {"load_in_8bit": True}
    assert Backbone.of(model).dtype_and_quantization({}) == ("fp32", "int8")


def test_packed_projections_are_found():
    model = tiny_models.model("bert")
    assert ah.anatomy_of(model).packed_hosts() == []
    query = model.bert.encoder.layer[0].attention.self.query
    anatomy = ah.anatomy_of(model)
    del query.weight
    assert anatomy.packed_hosts() == ["bert.encoder.layer.0.attention.self.query"]


def test_a_plain_tensor_is_whole():
    tensor = torch.zeros(2)
    assert not is_sharded(tensor)
    assert whole(tensor) is tensor


def test_the_device_of_a_module():
    assert device_of(nn.Linear(2, 2)) == torch.device("cpu")
    assert device_of(nn.Sequential(nn.ReLU(), nn.Linear(2, 2, device="meta"))).type == "meta"
    assert device_of(nn.ReLU()) is None

"""Quantization schemes: names, checks before loading, stored configurations."""

from __future__ import annotations

import json

import pytest
import torch

from adapterhub.anatomy.backbone import quantization_kind
from adapterhub.backbones import quantized
from adapterhub.backbones.checkpoint import stored_quantization
from adapterhub.backbones.quantized import QUANTIZATIONS, loading_options, remaining_quantization
from adapterhub.backbones.torch_free_checks import QUANTIZATION_LIBRARIES
from adapterhub.errors import ConfigError

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def torchao(name):
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": name}}}


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(quantized.importlib.util, "find_spec", lambda name: True)


def checkpoint(folder, config):
    text = json.dumps({"quantization_config": config} if config else {})
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def test_a_configuration_has_a_kind(subtests):
    cases = [
        (NF4, "nf4"),
        (NF4 | {"bnb_4bit_quant_type": "fp4"}, "fp4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({}, "unknown"),
        (torchao("Int8WeightOnlyConfig"), "int8-weight"),
        (torchao("Float8WeightOnlyConfig"), "fp8-weight"),
        (torchao("Float8Config"), "torchao-Float8Config"),
    ]
    for config, kind in cases:
        with subtests.test(config=config):
            assert quantization_kind(config) == kind


def test_the_kind_of_each_scheme_is_its_own_name():
    pytest.importorskip("bitsandbytes")
    for name in ("nf4", "fp4", "int8"):
        config = QUANTIZATIONS[name].config(torch.bfloat16, ["head"])
        assert quantization_kind(config.to_dict()) == name
        assert config.llm_int8_skip_modules == ["head"]


def test_a_checkpoint_in_floating_point_is_still_to_be_quantized(installed, tmp_path):
    for folder in (tmp_path, checkpoint(tmp_path, None)):
        assert stored_quantization(folder) is None
        assert remaining_quantization("nf4", folder) == "nf4"
        assert remaining_quantization(None, folder) is None


def test_a_checkpoint_quantized_as_requested_needs_nothing_more(installed, tmp_path):
    folder = checkpoint(tmp_path, NF4)
    assert stored_quantization(folder) == "bitsandbytes"
    assert remaining_quantization("nf4", folder) is None
    assert remaining_quantization(None, folder) is None


def test_a_checkpoint_quantized_otherwise_is_refused(installed, tmp_path):
    with pytest.raises(ConfigError, match="quantized already, by bitsandbytes"):
        remaining_quantization("int8", checkpoint(tmp_path, NF4))


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_a_library_that_is_not_installed_is_named(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized.importlib.util, "find_spec", lambda name: None)
    library, extra = QUANTIZATION_LIBRARIES[kind]
    with pytest.raises(ConfigError, match=f"needs {library}") as error:
        remaining_quantization(kind, tmp_path)
    assert error.value.hint == f'pip install "adapterhub[{extra}]"'


def test_options_are_unchanged_without_quantization(tmp_path):
    options = {"dtype": torch.float32, "num_labels": 2}
    assert loading_options(None, checkpoint(tmp_path, None), options, None) is options

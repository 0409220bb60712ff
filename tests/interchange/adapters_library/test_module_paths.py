"""Module paths of `adapters` are mapped to sites; tensors are taken once."""

from __future__ import annotations

import pytest
import torch

from adapterhub.anatomy.build import anatomy_of
from adapterhub.interchange.adapters_library.module_paths import (
    RemainingTensors,
    attention_at,
    check_sites,
    layer_number,
    local_path,
    projections_at,
    sites_with_roles,
    sublayer_at,
)
from adapterhub.interchange.translation import Translation
from tests.kit import tiny_models


@pytest.fixture(scope="module")
def bert():
    return anatomy_of(tiny_models.model("bert"))


def test_tensors_are_taken_by_kind_and_path():
    names = ("a.loras.own.lora_A", "b.loras.own.lora_A", "loras.own.x", "a.loras.other.lora_A")
    remaining = RemainingTensors("own", dict.fromkeys(names, torch.ones(1)))
    taken = remaining.take("loras", lambda path: path != "b")
    assert [(path, parameter) for path, parameter, _ in taken] == [("a", "lora_A"), ("", "x")]
    assert remaining.names() == ["a.loras.other.lora_A", "b.loras.own.lora_A"]
    assert remaining.take("adapters") == []


def test_an_adapter_name_is_no_pattern():
    remaining = RemainingTensors("o.n", {"a.loras.own.lora_A": torch.ones(1)})
    assert remaining.take("loras") == []


@pytest.mark.parametrize("prefix", ["bert", "any_name"])
def test_paths_in_layers_are_split(bert, prefix):
    assert local_path(bert, f"{prefix}.encoder.layer.1.output") == ("encoder", 1, "output")
    assert local_path(bert, f"{prefix}.pooler.dense") is None


def test_sites_are_found_by_module(bert):
    layer = "bert.encoder.layer.1"
    assert sublayer_at(bert, f"{layer}.output").id == "encoder.1.ffn"
    assert sublayer_at(bert, f"{layer}.attention.output").id == "encoder.1.attn"
    assert attention_at(bert, f"{layer}.attention.self").id == "encoder.1.attn.kv"
    (site,) = projections_at(bert, f"{layer}.attention.self.query")
    assert site.id == "encoder.1.attn.q"
    assert (sublayer_at(bert, "bert.pooler"), attention_at(bert, "x")) == (None, None)
    assert projections_at(bert, "bert.encoder.layer.9.output.dense") == []


def test_a_fused_projection_has_parts():
    gpt2 = anatomy_of(tiny_models.model("gpt2"))
    sites = projections_at(gpt2, "transformer.h.0.attn.c_attn")
    assert [site.role for site in sites] == ["attn.q", "attn.k", "attn.v"]


def test_decoder_layers_continue_those_of_the_encoder():
    t5 = anatomy_of(tiny_models.model("t5", "seq2seq"))
    depth = t5.depth("encoder")
    assert layer_number(t5, t5.sites["encoder.1.attn"]) == 1
    assert layer_number(t5, t5.sites["decoder.1.attn"]) == depth + 1
    sites = sites_with_roles(t5, ["attn"], leave_out=[depth])
    assert "decoder.0.attn" not in {site.id for site in sites}
    assert {"encoder.0.attn", "decoder.1.attn"} <= {site.id for site in sites}


def test_sites_with_tensors_must_be_named(bert):
    translation = Translation(bert)
    first, second = bert.sites["encoder.0.attn"], bert.sites["encoder.1.attn"]
    check_sites([first], [first], translation)
    assert translation.problems == []
    check_sites([first], [second], translation)
    assert translation.problems == [
        "encoder.1.attn: named by the options, but has no tensors",
        "encoder.0.attn: has tensors, but the options do not name it",
    ]

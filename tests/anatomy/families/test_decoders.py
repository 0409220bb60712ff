"""Rows of decoders: every row names modules that exist; fused projections have slices."""

from __future__ import annotations

import adapterhub as ah
from adapterhub.anatomy.families import decoders, rows_of
from tests.kit import tiny_models

TYPES = [model_type for row in rows_of(decoders) for model_type in row.model_types]


def test_the_rows_are_found():
    assert len(TYPES) >= 17
    assert len(set(TYPES)) == len(TYPES)


def test_a_decoder_has_one_stack_with_projections_in_every_layer():
    for architecture in TYPES:
        anatomy = ah.anatomy_of(tiny_models.usual_model(architecture))
        assert list(anatomy.stacks) == ["decoder"], architecture
        for layer in range(anatomy.depth("decoder")):
            for role in ("attn.q", "attn.v", "attn.o"):
                assert f"decoder.{layer}.{role}" in anatomy.sites, architecture


def test_the_fused_projection_of_gpt2_has_three_slices():
    sites = ah.anatomy_of(tiny_models.language_model("gpt2")).sites
    hosts = {sites[f"decoder.0.attn.{name}"].host for name in "qkv"}
    assert hosts == {"transformer.h.0.attn.c_attn"}
    assert all(sites[f"decoder.0.attn.{name}"].part is not None for name in "qkv")
    assert sites["decoder.0.attn.qkv"].part is None


def test_llama_has_a_gate_and_opt_has_none():
    assert "decoder.0.ffn.gate" in ah.anatomy_of(tiny_models.language_model("llama")).sites
    assert "decoder.0.ffn.gate" not in ah.anatomy_of(tiny_models.language_model("opt")).sites

"""Applying a row to a model: layer lists, alternative paths, and rows that do not fit."""

from __future__ import annotations

import dataclasses

import pytest

import adapterhub as ah
from adapterhub.anatomy import FAMILIES
from adapterhub.anatomy.build import build_anatomy
from adapterhub.errors import BackboneError
from tests.kit import tiny_models


def test_a_decoder_without_an_encoder_has_no_cross_attention():
    """Its layers have the modules, and never run them."""
    alone = ah.anatomy_of(tiny_models.model("bart", "causal-lm"))
    assert "decoder.0.attn.q" in alone.sites
    assert not [name for name in alone.sites if ".cross" in name]
    assert "decoder.0.cross.q" in ah.anatomy_of(tiny_models.model("bart", "seq2seq")).sites


def test_hosts_and_input_hosts_are_modules_of_the_model(subtests):
    for architecture in tiny_models.ARCHITECTURES:
        with subtests.test(architecture):
            check_hosts(architecture)


def check_hosts(architecture):
    model = tiny_models.usual_model(architecture)
    sites = ah.anatomy_of(model).sites
    modules = dict(model.named_modules())
    assert len(sites) > 8
    for site_id, site in sites.items():
        assert site_id == site.id
        assert {site.host, site.input_host or site.host} <= modules.keys()
        assert site.d_in > 0
        assert site.d_out > 0


def test_the_first_existing_alternative_path_is_used():
    """T5's row has `wi` for the plain network and `wi_1` for the gated one."""
    for architecture, name in (("t5", "wi"), ("mt5", "wi_1")):
        sites = ah.anatomy_of(tiny_models.usual_model(architecture)).sites
        assert sites["encoder.0.ffn.up"].host.endswith(f"DenseReluDense.{name}")
        assert ("encoder.0.ffn.gate" in sites) == (architecture == "mt5")


def test_a_stack_that_the_model_does_not_have_is_left_out():
    anatomy = ah.anatomy_of(tiny_models.model("bart", "causal-lm", is_encoder_decoder=False))
    assert set(anatomy.stacks) == {"decoder"}
    assert len(anatomy.family.stacks) == 2


def test_layers_after_the_first_use_its_relative_positions():
    sites = ah.anatomy_of(tiny_models.usual_model("t5")).sites
    first = "encoder.block.0.layer.0.SelfAttention"
    assert sites["encoder.0.attn.kv"].bias.endswith(first)
    assert sites["encoder.1.attn.kv"].bias == sites["encoder.0.attn.kv"].bias
    assert sites["decoder.0.cross.kv"].bias is None


def test_a_row_that_does_not_fit_is_refused():
    stack = dataclasses.replace(FAMILIES["bert"].stacks[0], layers="nowhere.layer")
    row = dataclasses.replace(FAMILIES["bert"], stacks=(stack,))
    with pytest.raises(BackboneError, match=r"bert row .* does not fit") as error:
        build_anatomy(tiny_models.usual_model("bert"), row)
    assert "nowhere.layer" in error.value.expected

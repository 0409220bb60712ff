"""The options of the methods that train parts of the backbone: bitfit, norms."""

from __future__ import annotations

import pytest
import tiny_models

import adapterhub as ah
from adapterhub.errors import SiteError


def changed(architecture, spec):
    return {c.name for c in ah.attach(tiny_models.model(architecture), spec).changed}


def test_bitfit_on_the_papers_smaller_set():
    names = changed("bert", "bitfit(sites=['attn.q', 'ffn.up'])")
    roles = ("attn.q", "ffn.up")
    assert names == {f"encoder.{n}.{role}.bitfit.bias" for n in (0, 1) for role in roles}


def test_bitfit_in_one_layer():
    names = changed("bert", "bitfit(layers='top 1')")
    assert names
    assert all(name.startswith("encoder.1.") for name in names)
    assert names < changed("bert", "bitfit")


def test_bitfit_refuses_a_part_of_a_shared_bias():
    with pytest.raises(SiteError, match="share one") as error:
        changed("gpt2", "bitfit(sites=['attn.q', 'attn.o'])")
    assert error.value.offenders == ("attn.q",)
    assert changed("gpt2", error.value.hint)


def test_bitfit_refuses_sites_without_a_bias():
    with pytest.raises(SiteError, match="no bias at the sites"):
        changed("qwen2", "bitfit(sites=['ffn.up'])")


def test_norms_in_the_layers_alone():
    names = changed("mbart", "norms(outside=False)")
    outside = changed("mbart", "norms") - names
    assert all(name.startswith(("encoder.", "decoder.")) for name in names)
    assert {name.rsplit(".", 3)[1] for name in outside} == {"layer_norm", "layernorm_embedding"}


def test_norms_of_one_layer_and_the_final_one():
    assert changed("llama", "norms(layers=1)") == {
        "decoder.1.attn.norm.norms.weight",
        "decoder.1.ffn.norm.norms.weight",
        "backbone.norm.norms.weight",
    }

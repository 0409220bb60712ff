"""Sizes of sublayers, and stacks in front of which no virtual tokens can be put."""

from __future__ import annotations

from functools import cache

import every_type
import pytest
import sweep_cells

import adapterhub as ah


@cache
def tiny(model_type):
    """Return the model of a type, which each test leaves as it was."""
    auto = every_type.autos(model_type, every_type.ADAPTED)[0]
    return every_type.build(model_type, auto, tiny=True)


def test_a_mixer_has_the_hidden_size_though_attention_reads_more():
    """The attention of Zamba 2 reads the embeddings too, and is twice as wide."""
    sites = ah.anatomy_of(tiny("zamba2")).sites
    mixers = [site for site in sites.values() if site.role == "mixer"]
    assert len(mixers) == 6
    assert {(site.d_in, site.d_out) for site in mixers} == {(32, 32)}
    assert {site.d_in for site in sites.values() if site.role == "attn.q"} == {64}


@pytest.mark.parametrize(
    ("model_type", "stack"), [("deepseek_v4", "decoder"), ("speech_to_text", "decoder")]
)
def test_no_virtual_tokens_where_token_ids_are_read(model_type, stack):
    sites = ah.anatomy_of(tiny(model_type)).sites
    assert any(name.startswith(f"{stack}.0.attn.") for name in sites)
    assert f"{stack}.embed" not in sites


@pytest.mark.parametrize(
    ("model_type", "method", "outcome"),
    [
        ("zamba2", "pfeiffer", "ok"),
        ("deepseek_v4", "lora", "ok"),
        ("deepseek_v4", "prompt", "refused: "),
        ("speech_to_text", "prompt", "refused: "),
        ("higgs_audio_v2", "prompt", "ok"),
        ("pocket_tts", "prompt", "ok"),
    ],
)
def test_cells_of_the_sweep_that_failed(model_type, method, outcome):
    model = tiny(model_type)
    found = sweep_cells.cell(model, method, sweep_cells.inputs_for(model))
    assert found.startswith(outcome), found

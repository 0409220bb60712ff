"""Rows of encoder-decoders: two stacks, cross-attention in the second."""

from __future__ import annotations

import adapterhub as ah
from adapterhub.anatomy.families import encoder_decoders, rows_of
from tests.kit import tiny_models

TYPES = [model_type for row in rows_of(encoder_decoders) for model_type in row.model_types]


def test_the_rows_are_found():
    assert len(TYPES) >= 8
    assert len(set(TYPES)) == len(TYPES)


def test_only_the_decoder_has_cross_attention(subtests):
    for architecture in TYPES:
        with subtests.test(architecture=architecture):
            anatomy = ah.anatomy_of(tiny_models.usual_model(architecture))
            assert list(anatomy.stacks) == ["encoder", "decoder"]
            cross = {site.stack for site in anatomy.sites.values() if site.role.startswith("cross")}
            assert cross == {"decoder"}
            for layer in range(anatomy.depth("decoder")):
                assert f"decoder.{layer}.cross.q" in anatomy.sites


def test_t5_has_a_bias_of_relative_positions_and_bart_has_none():
    t5, bart = (ah.anatomy_of(tiny_models.usual_model(name)).sites for name in ("t5", "bart"))
    assert t5["decoder.1.attn.kv"].bias is not None
    assert bart["decoder.1.attn.kv"].bias is None

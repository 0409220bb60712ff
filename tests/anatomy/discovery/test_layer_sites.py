"""The sites of one layer: sublayers, further projections, norms."""

from __future__ import annotations

import every_type
import pytest

from adapterhub.anatomy.discovery.layer_sites import sites_of_layer


@pytest.mark.parametrize(
    ("model_type", "layers", "sites"),
    [
        (
            "llama",
            "layers",
            {
                "attn.q": "self_attn.q_proj",
                "attn.k": "self_attn.k_proj",
                "attn.v": "self_attn.v_proj",
                "attn.o": "self_attn.o_proj",
                "attn.kv": "self_attn",
                "ffn.gate": "mlp.gate_proj",
                "ffn.up": "mlp.up_proj",
                "ffn.down": "mlp.down_proj",
                "attn.norm": "input_layernorm",
                "ffn.norm": "post_attention_layernorm",
            },
        ),
        (
            "mamba",
            "layers",
            {
                "mixer.in_proj": "mixer.in_proj",
                "mixer.x_proj": "mixer.x_proj",
                "mixer.dt_proj": "mixer.dt_proj",
                "mixer.out_proj": "mixer.out_proj",
                "mixer": "mixer",
            },
        ),
    ],
)
def test_the_sites_of_a_layer(model_type, layers, sites):
    model = every_type.build(model_type, "AutoModel")
    layer = model.get_submodule(layers)[0]
    assert sites_of_layer(layer, model.config.hidden_size) == sites

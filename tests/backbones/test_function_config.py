"""Which fields of a configuration are part of a backbone's identity."""

from __future__ import annotations

import json

import transformers

from adapterhub.backbones.fingerprint import config_differences, function_config
from tests.kit import tiny_models
from tests.kit.selection import long_table


@long_table("architecture", tiny_models.ARCHITECTURES, 4)
def test_it_is_the_same_in_files_and_for_every_task(architecture, tmp_path):
    model = tiny_models.usual_model(architecture)
    expected = function_config(model.config)
    assert json.loads(json.dumps(expected)) == expected
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoConfig.from_pretrained(tmp_path, num_labels=7)
    assert function_config(loaded) == expected
    base = tiny_models.model(architecture, "features", **tiny_models.NO_DROPOUT)
    assert config_differences(expected, function_config(base.config)) == []
    assert not {"vocab_size", "pad_token_id", "use_cache"} & expected.keys()
    assert len(expected) > 4


def test_only_fields_that_both_have_are_compared():
    before = {"a": 1, "rope": {"theta": 1.0, "type": "default"}, "old": 3}
    now = {"a": 2, "rope": {"theta": 2.0, "factor": 8}, "new": 4}
    assert config_differences(before, now) == [
        "a: 2, trained with 1",
        "rope.theta: 2.0, trained with 1.0",
    ]


def test_the_length_of_a_dynamic_rope_counts():
    plain = transformers.LlamaConfig(max_position_embeddings=64)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    dynamic = transformers.LlamaConfig(max_position_embeddings=64, rope_parameters=rope)
    assert "max_position_embeddings" not in function_config(plain)
    assert function_config(dynamic)["max_position_embeddings"] == 64


def test_options_that_differ_between_layers_count():
    config = transformers.CONFIG_MAPPING["gemma4_text"]()
    assert function_config(config)["head_dim"] == 256
    assert function_config(config)["per_layer_config"]["05"] == {"head_dim": 512}


def test_nested_configurations_count():
    config = transformers.LlavaConfig()
    config.text_config.rms_norm_eps = 0.5
    assert function_config(config)["text_config"]["rms_norm_eps"] == 0.5

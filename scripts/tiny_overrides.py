"""Options of types that scripts/shrink.py leaves large or invalid, or that do not run without.

A test builds and runs each type without its entry: one that is no longer needed fails it.
"""

from __future__ import annotations

from typing import Any

_SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 3
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_ROPE_OF_THREE = _ROPE | {"mrope_section": [2, 1, 1]}
_STAGES = {"embed_dim": 16, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 2, 4]}
_GEMMA_SHARED = {"layer_types": _SLIDING_AND_FULL, "num_kv_shared_layers": 2}
_EQUAL_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
_DOTS = _EQUAL_HEADS | {"per_layer_config": None, "head_dim": 16}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [2]},
    "bit": {"hidden_sizes": [32, 32, 64, 64], "depths": [1] * 4, "num_groups": 4},
    "bridgetower": {
        "vision_config": {"hidden_size": 64},
        "text_config": {"hidden_size": 32},
    },
    "chameleon": {"vocabulary_map": {"<image>": 8}, "vq_config": {"base_channels": 32}},
    "clipseg": {"text_config": {"eos_token_id": 2}},  # texts end at the largest id
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": _ROPE}}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "cosmos3_edge": {"text_config": {"rope_parameters": {"mrope_section": [2, 1, 1]}}},
    "cosmos3_edge_text": {"rope_parameters": {"mrope_section": [2, 1, 1]}},
    "cpmant": {"dim_ff": 48, "dim_head": 8},
    "dbrx": {
        "attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "rope_parameters": _ROPE,
    },
    "deepseek_v2": _EQUAL_HEADS | {"num_experts_per_tok": 2},
    "deepseek_v3": _EQUAL_HEADS | {"n_group": 2, "topk_group": 1},
    "deit": {"architectures": ["DeiTForImageClassification"]},
    "donut-swin": _STAGES,
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
    },
    "dots3_note_text": _DOTS,
    "emu3": {
        "vocabulary_map": {"<image>": 8},
        "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1, 1, 2]},
    },
    "esmc": _EQUAL_HEADS,
    "gemma3n_text": _GEMMA_SHARED
    | {
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
        "intermediate_size": 48,
        "activation_sparsity_pattern": [0.0] * 6,
    },
    "gemma4": {"text_config": {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8}},
    "gemma4_text": {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8},
    "glm4_moe_lite": _EQUAL_HEADS,
    "glm5_next": {"text_config": _EQUAL_HEADS},
    "glm5_next_text": _EQUAL_HEADS,
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"] * 2},
    "higgs_audio_v2": {
        "audio_token_id": 6,
        "audio_bos_token_id": 7,
        "audio_delay_token_id": 8,
    },
    "kimi_linear": _EQUAL_HEADS | {"num_experts_per_token": 2},
    "levit": {"architectures": ["LevitForImageClassification"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
    "mamba2": {"num_heads": 8},
    "maskformer-swin": _STAGES,
    "minicpm3": _EQUAL_HEADS,
    "moonshine_streaming": {"num_key_value_heads": 4, "encoder_config": {"num_key_value_heads": 4}},
    "nemotron_h": {"n_groups": 2},
    "neomme": {"head_dim": 16},
    "perceiver": {"d_latents": 64, "num_self_attends_per_block": 2, "num_latents": 8},
    "phi4_multimodal": {"audio_config": {"nemo_conv_channels": 32}},
    "pocket_tts": {
        "audio_prompt_token_id": 6,
        "audio_latent_token_id": 7,
        "audio_prompt_bos_token_id": 8,
        "audio_bos_token_id": 9,
    },
    "qwen2_5_vl": {"text_config": {"rope_parameters": _ROPE_OF_THREE}},
    "qwen2_vl": {"text_config": {"rope_parameters": _ROPE_OF_THREE}},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 2,
    },
    "reformer": {
        "axial_pos_embds": False,
        "local_attn_chunk_length": 3,  # training takes multiples of it
        "lsh_attn_chunk_length": 3,
        "max_position_embeddings": 64,
        "attention_head_size": 8,
        "num_buckets": 4,
    },
    "swin": _STAGES,
    "swin2sr": {"num_heads": [4] * 6},
    "swinv2": _STAGES,
    "vits": {"upsample_initial_channel": 64},
    "xclip": {"projection_dim": 32},
    "zamba": {
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "layers_block_type": ["linear_attention", "hybrid"] * 3,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 3} | _EQUAL_HEADS,
}

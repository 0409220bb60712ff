"""Methods on the architectures that people use in 2026, rows or not: tiny, random, and run.

Each cell is attached, starts as its method says, learns, equals a generation step with a cache, is
saved and loaded, and leaves the backbone as it was (scripts/sweep_cells.py). What is refused is in
a table, and nothing else is. A core subset by default, all with ADAPTERHUB_MATRIX=full.
"""

from __future__ import annotations

from functools import lru_cache

import every_type
import sweep_cells

from tests.kit import tiny_models
from tests.kit.selection import long_table

METHODS = ("lora", "pfeiffer", "ia3", "prefix", "bitfit", "norms", "full", "unfreeze")
TYPES = (
    "bamba", "big_bird", "blenderbot", "clip", "convnext", "deepseek_v2", "deepseek_v3", "dinov2",
    "dinov3_vit", "falcon", "falcon_h1", "gemma3", "gemma3n_text", "glm4_moe_lite", "gpt_bigcode",
    "gpt_oss", "granitemoehybrid", "hubert", "idefics3", "internvl", "jamba", "kimi_linear", "led",
    "lfm2", "llama4", "llava", "longformer", "mamba", "mamba2", "marian", "minicpm3", "mistral3",
    "moonshine", "mpt", "nemotron_h", "olmo_hybrid", "qwen2_5_vl", "qwen2_vl", "qwen3_5",
    "qwen3_next", "qwen3_vl", "recurrent_gemma", "rwkv", "segformer", "siglip", "smolvlm", "swin",
    "t5gemma", "vit", "wav2vec2", "whisper", "zamba2",
)  # fmt: skip
# Latent attention, experts, one key-value head, pictures, sound.
CORE = ("deepseek_v3", "gpt_oss", "falcon", "vit", "wav2vec2")
# (method, part of the reason) -> types.
_REASONS = {
    ("bitfit", "none"): (
        "deepseek_v2", "deepseek_v3", "gemma3n_text", "glm4_moe_lite", "kimi_linear", "lfm2",
        "minicpm3", "mistral3", "mpt", "olmo_hybrid", "qwen3_next", "t5gemma",
    ),
    ("prefix", "no such site"): ("convnext", "longformer", "mamba", "mamba2", "rwkv"),
    ("prefix", "not all layers"): ("gemma3n_text", "led"),
}  # fmt: skip
REFUSED = {(method, t): why for (method, why), types in _REASONS.items() for t in types}
# The biases are in a part of the model that texts do not reach.
NOT_REACHED = ("gemma3", "idefics3", "llama4", "llava", "qwen3_5", "qwen3_vl", "smolvlm")
CELLS = [(m, t) for t in (TYPES if tiny_models.FULL_MATRIX else CORE) for m in METHODS]


@lru_cache(maxsize=2)
def built(model_type):
    auto = every_type.autos(model_type, every_type.ADAPTED)[0]
    model = every_type.build(model_type, auto, tiny=True)
    assert model is not None
    inputs = sweep_cells.inputs_for(model)
    assert inputs is not None, "nothing is known that it runs on"
    return model, inputs


def test_the_table_is_complete():
    assert len(TYPES) == len(set(TYPES)) >= 52
    assert {*CORE, *NOT_REACHED, *(t for _, t in REFUSED)} <= set(TYPES) <= set(every_type.TYPES)
    assert {m for m, _ in REFUSED} <= set(METHODS)
    assert len(TYPES) * len(METHODS) - len(REFUSED) >= 393


@long_table(("method", "model_type"), CELLS, parts=4)
def test_a_method_works_or_is_refused_as_the_table_says(method, model_type):
    found = sweep_cells.cell(built(model_type)[0], method, built(model_type)[1])
    if reason := REFUSED.get((method, model_type)):
        assert found.startswith("refused: ")
        assert reason in found
    else:
        not_reached = method == "bitfit" and model_type in NOT_REACHED
        assert found == ("ok, not run" if not_reached else "ok")
